"""Every way of drafting, as data: what the engine, hosts, benchmarks, error messages and tables know of a method.

What builds one is in ``propose.registry``, under the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .step import ProposerTraits


@dataclass(frozen=True, slots=True)
class Method:
    """A value of ``speculative_config``'s key ``method``."""

    name: str
    what: str
    """What drafts, in a few words."""
    traits: ProposerTraits
    checkpoint: str | None = None
    """What ``model`` names; None = there is no model."""
    aliases: tuple[str, ...] = ()
    """Other names; they may also stand in the place of a model."""
    reads_target: bool = False
    """It reads the target's hidden states, so it needs a host that keeps them."""
    in_target: bool = False
    """Without a ``model``, what drafts is in the target's own checkpoint."""
    key: str | None = None
    """The key of ``speculative_config`` without which it cannot draft, and which no other method has."""


_ALL = (
    Method(
        "draft_model",
        "a small model, of the target's vocabulary or another",
        ProposerTraits("draft_model", probe_context=True, trees=True),
        checkpoint="a draft model's checkpoint",
    ),
    Method(
        "early_exit",
        "the target's own first layers, with its final norm and its output layer",
        ProposerTraits("early_exit"),
        in_target=True,
        key="assistant_early_exit",
    ),
    Method(
        "eagle",
        "an EAGLE-1 or EAGLE-2 head, which reads the target's last hidden state",
        ProposerTraits("eagle", trees=True),
        checkpoint="an EAGLE head's checkpoint",
        reads_target=True,
    ),
    Method(
        "eagle3",
        "an EAGLE-3 head, which reads the target's hidden states",
        ProposerTraits("eagle3", trees=True),
        checkpoint="an EAGLE-3 head's checkpoint",
        reads_target=True,
    ),
    Method(
        "medusa",
        "Medusa heads, which read the target's last hidden state",
        ProposerTraits("medusa", passes_per_draft="one", trees=True),
        checkpoint="a Medusa checkpoint",
        reads_target=True,
    ),
    Method(
        "mlp_speculator",
        "an MLP speculator, which reads the target's last hidden state",
        ProposerTraits("mlp_speculator", trees=True),
        checkpoint="an MLP speculator's checkpoint",
        reads_target=True,
    ),
    Method(
        "mtp",
        "a prediction layer that was trained with the target",
        ProposerTraits("mtp", trees=True),
        checkpoint="a prediction layer's checkpoint, or no model: then the target's own",
        reads_target=True,
        in_target=True,
    ),
    Method(
        "ngram",
        "a lookup of the latest tokens in the request's own text",
        ProposerTraits("ngram", passes_per_draft="none", has_confidence=False),
        aliases=("[ngram]",),
    ),
    Method(
        "suffix",
        "suffix trees of the request's own text and of earlier answers",
        ProposerTraits("suffix", passes_per_draft="none", has_confidence=False, trees=True),
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
WITH_MODEL = tuple(method.name for method in _ALL if method.checkpoint is not None)
BY_PASSES = tuple(method.name for method in _ALL if method.traits.passes_per_draft != "none")
"""Methods that draft by a model's passes; the others look drafts up."""
OF_TOKENS = tuple(method.name for method in _ALL if not (method.reads_target or method.in_target))
"""Methods that draft whoever runs the target."""
WITH_TREES = tuple(method.name for method in _ALL if method.traits.trees)
WITH_CONFIDENCE = tuple(method.name for method in _ALL if method.traits.has_confidence)
