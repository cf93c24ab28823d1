"""EAGLE-3 heads (Li et al., 2503.01840): a decoder layer on three hidden states of the target, and an output layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynaspec.train.heads.basis import Basis
from dynaspec.train.heads.card import decoder_sizes, drafted_tokens, listed
from dynaspec.train.heads.decoder import DecoderHead, Layer, RMSNorm
from dynaspec.train.heads.export import decoder_config
from dynaspec.train.heads.shape import HeadShape, aux_layers, shape_for
from dynaspec.train.heads.start import Start, read_start
from dynaspec.train.heads.vocabulary import DraftVocabulary

FORMAT_VERSION = "0.9.0"
HEAD_SCALE = 0.25
"""Of the target's output rows at the start: at 1 the loss begins far above that of a uniform guess, as untrained states
mean nothing to them."""


class Eagle3Layer(Layer):
    """Its attention reads embedding and hidden state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        # Nothing but projections reads it, so they can do its weight's work; and the embedding needs no gradient.
        self.input_layernorm.weight.requires_grad_(False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)


class Eagle3Head(DecoderHead):
    """Parameters have the names of the checkpoint."""

    def __init__(self, shape: HeadShape, vocabulary: DraftVocabulary, embedding: Tensor, scale: Tensor) -> None:
        """See :class:`DecoderHead`."""
        super().__init__(shape, vocabulary.ids, embedding, scale)
        self.fc = nn.Linear(shape.aux_width, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(shape)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self._vocabulary = vocabulary

    @property
    def output(self) -> Tensor:
        """See :class:`TrainedHead`."""
        return self.lm_head.weight

    def fuse(self, states: Tensor) -> Tensor:
        """See :class:`DecoderHead`."""
        fused: Tensor = self.fc(states)
        return fused

    def enter(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`DecoderHead`."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        hidden = layer.hidden_norm(state)
        embedded = nn.functional.embedding(tokens, self.get_buffer("embedding"))
        dtype = embedded.dtype
        both = torch.cat([layer.input_layernorm(embedded).to(dtype), hidden.to(dtype)], dim=-1)
        return both, hidden if self.shape.norm_before_residual else state

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`DecoderHead`."""
        return self.norm(x), x

    def folds(self) -> dict[str, Tensor]:
        """See :class:`TrainedHead`."""
        return {"fc.weight": 1 / self.get_buffer("scale")}

    def maps(self) -> dict[str, Tensor]:
        """``d2t`` and ``t2d``, unless everything can be drafted."""
        return {"d2t": self._vocabulary.d2t, "t2d": self._vocabulary.t2d} if self.partial else {}


@torch.no_grad()
def initialise(head: Eagle3Head, target_head: Tensor, target_norm: Tensor | None, seed: int) -> None:
    """Start weights: the fused state is the latest of the target's plus noise, lm_head the target's.

    Args:
        target_head: [draft_vocab, hidden], the target's rows of the draft vocabulary.
        target_norm: [hidden], weight of the target's final norm, if it has one.
    """
    head.initialise_layer(torch.Generator().manual_seed(seed))
    late = head.get_buffer("scale")[-head.shape.hidden :]
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -head.shape.hidden :] += torch.diag(late / late.mean()).to(head.fc.weight)
    head.lm_head.weight.copy_(target_head.float() * HEAD_SCALE)
    if target_norm is not None:
        head.norm.weight.copy_(target_norm.float())


@dataclass(frozen=True, slots=True)
class Eagle3:
    """See ``kind.Kind``. ``start_from`` is a head's folder or hub id."""

    norm_before_residual: bool = True
    start_from: str | None = None
    method = "eagle3"
    title = "EAGLE-3 head"

    @property
    def options(self) -> dict[str, Any]:
        """See ``Kind``: the shape says it all."""
        return {}

    def shape(self, config: Mapping[str, Any], draft_vocab: int, start: Start | None) -> HeadShape:
        """See ``Kind``."""
        residual = self.norm_before_residual if start is None else start.norm_before_residual
        return shape_for(config, draft_vocab, aux_layers(int(config["num_hidden_layers"])), residual)

    def start(self, config: Mapping[str, Any]) -> Start | None:
        """See ``Kind``."""
        if self.start_from is None:
            return None
        return read_start(self.start_from, int(config["num_hidden_layers"]), int(config["vocab_size"]))

    def head(self, basis: Basis, seed: int) -> Eagle3Head:
        """See ``Kind``."""
        head = Eagle3Head(basis.shape, basis.vocabulary, basis.embedding, basis.scale)
        initialise(head, basis.output[basis.vocabulary.ids], basis.target_norm, seed)
        return head

    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """See ``Kind``; the format is that of ``speculators``."""
        shape = basis.shape
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": FORMAT_VERSION,
            "torch_dtype": "bfloat16",
            "draft_vocab_size": shape.draft_vocab,
            "norm_before_residual": shape.norm_before_residual,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
            "embed_requires_grad": False,
            "transformer_layer_config": decoder_config(shape),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": drafts,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": verifier, "architectures": architectures},
            },
        }

    def described(self, facts: Mapping[str, Any]) -> str:
        """See ``Kind``."""
        shape = facts["shape"]
        residual = "normalised" if shape["norm_before_residual"] else "fused"
        return f"""hidden states (inputs of layers {listed(shape["aux_layers"])}): {decoder_sizes(facts)} The residual
        stream starts from the {residual} state. {drafted_tokens(facts)} Format: `speculators` (`eagle3`)."""
