"""EAGLE heads (Li et al., 2401.15077; 2503.01840): a decoder layer on the target's hidden states.

EAGLE guesses the target's next final state, of which the target's own output layer makes logits. It is trained like the
published ones, on both the states and the tokens, and like EAGLE-3 on several drafts in a row, as HASS (2408.15766)
first did. EAGLE-3 reads three hidden states and has an output layer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .basis import Basis
from .decoder import DecoderHead, Layer, RMSNorm
from .export import decoder_config, decoder_sizes, drafted_tokens, listed
from .head import Kind
from .shape import DraftVocabulary, HeadShape, Start, aux_layers, read_start, shape_for

FORMAT_VERSION = "0.9.0"
HEAD_SCALE = 0.25
"""Of the target's output rows at the start: at 1 the loss begins far above that of a uniform guess, as untrained states
mean nothing to them."""


class EagleHead(DecoderHead):
    """Parameters have the names of the checkpoint.

    All that is trained is of size one: the embedding is divided by its root mean square, the residual stream by that
    of the target's final states, ``unit``, and what ``fc`` reads of these by that of each channel. The checkpoint's
    matrices have these factors folded in; behind a norm none is needed.
    """

    def __init__(self, shape: HeadShape, embedding: Tensor, output: Tensor, scale: Tensor, regression: float) -> None:
        """``output`` [vocab, hidden] is the target's; ``regression`` is the weight of the loss on states."""
        super().__init__(shape, torch.arange(shape.vocab), embedding, scale)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, shape.hidden)])
        self.register_buffer("target_output", output, persistent=False)
        self.register_buffer("unit", scale.float().square().mean().sqrt(), persistent=False)
        self.register_buffer("embedding_size", embedding.float().square().mean().sqrt(), persistent=False)
        self._regression = regression

    @property
    def output(self) -> Tensor:
        """See :class:`TrainedHead`: frozen."""
        return self.get_buffer("target_output")

    def fuse(self, states: Tensor) -> Tensor:
        """See :class:`DecoderHead`: there is only one."""
        return states

    def enter(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = nn.functional.embedding(tokens, self.get_buffer("embedding"))
        embedded = embedded / self.get_buffer("embedding_size").to(embedded.dtype)
        x: Tensor = self.fc(torch.cat([embedded, state.to(embedded.dtype)], dim=-1))
        return x, x

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`DecoderHead`: the guessed state is read as it is, and goes on as the target's own come."""
        guess = x * self.get_buffer("unit")
        return guess, guess / self.get_buffer("scale")

    def extra_loss(self, read: Tensor, states: Tensor) -> Tensor | None:
        """The smooth L1 distance of guessed states, in units of their size."""
        unit = self.get_buffer("unit")
        apart = nn.functional.smooth_l1_loss(read.float() / unit, states.float() / unit, reduction="none")
        return self._regression * apart.mean(-1)

    def folds(self) -> dict[str, Tensor]:
        unit, scale = self.get_buffer("unit"), self.get_buffer("scale")
        embedded = self.get_buffer("embedding_size").expand_as(scale)
        inward = {f"layers.0.self_attn.{name}_proj.weight": 1 / unit for name in "qkv"}
        outward = {f"layers.0.{name}.weight": unit for name in ("self_attn.o_proj", "mlp.down_proj")}
        return {"fc.weight": unit / torch.cat([embedded, scale]), **inward, **outward}


@torch.no_grad()
def initialise_eagle(head: EagleHead, seed: int) -> None:
    """Start weights: the guess is the state that the head was given, and noise."""
    head.initialise_layer(torch.Generator().manual_seed(seed))
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -head.shape.hidden :] += torch.diag(head.get_buffer("scale") / head.get_buffer("unit"))


@dataclass(frozen=True, slots=True)
class Eagle(Kind):
    """See ``Kind``. ``regression`` is the weight of the loss on states beside that on tokens."""

    regression: float = 10.0
    method = "eagle"
    title = "EAGLE head"

    @property
    def options(self) -> dict[str, Any]:
        return {"regression": self.regression}

    def head(self, basis: Basis, seed: int) -> EagleHead:
        head = EagleHead(basis.shape, basis.embedding, basis.output, basis.scale, self.regression)
        initialise_eagle(head, seed)
        return head

    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """See ``Kind``; the format is the authors'."""
        return {**decoder_config(basis.shape), "torch_dtype": "bfloat16", "bias": False}

    def described(self, facts: Mapping[str, Any]) -> str:
        return f"""last hidden state: {decoder_sizes(facts)} It guesses the next such state, and the target's output
        layer turns that into tokens. Format: the authors' (EAGLE-1, EAGLE-2), without a bias."""


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
        super().__init__(shape, vocabulary.ids, embedding, scale)
        self.fc = nn.Linear(shape.aux_width, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(shape)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self._vocabulary = vocabulary

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight

    def fuse(self, states: Tensor) -> Tensor:
        fused: Tensor = self.fc(states)
        return fused

    def enter(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        hidden = layer.hidden_norm(state)
        embedded = nn.functional.embedding(tokens, self.get_buffer("embedding"))
        dtype = embedded.dtype
        both = torch.cat([layer.input_layernorm(embedded).to(dtype), hidden.to(dtype)], dim=-1)
        return both, hidden if self.shape.norm_before_residual else state

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), x

    def folds(self) -> dict[str, Tensor]:
        return {"fc.weight": 1 / self.get_buffer("scale")}

    def maps(self) -> dict[str, Tensor]:
        """``d2t`` and ``t2d``, unless everything can be drafted."""
        return {"d2t": self._vocabulary.d2t, "t2d": self._vocabulary.t2d} if self.partial else {}


@torch.no_grad()
def initialise_eagle3(head: Eagle3Head, target_head: Tensor, target_norm: Tensor | None, seed: int) -> None:
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
class Eagle3(Kind):
    """See ``Kind``; the shape says what makes two runs differ. ``start_from`` is a head's folder or hub id."""

    norm_before_residual: bool = True
    start_from: str | None = None
    method = "eagle3"
    title = "EAGLE-3 head"

    def shape(self, config: Mapping[str, Any], draft_vocab: int, start: Start | None) -> HeadShape:
        residual = self.norm_before_residual if start is None else start.norm_before_residual
        return shape_for(config, draft_vocab, aux_layers(int(config["num_hidden_layers"])), residual)

    def start(self, config: Mapping[str, Any]) -> Start | None:
        if self.start_from is None:
            return None
        return read_start(self.start_from, int(config["num_hidden_layers"]), int(config["vocab_size"]))

    def head(self, basis: Basis, seed: int) -> Eagle3Head:
        head = Eagle3Head(basis.shape, basis.vocabulary, basis.embedding, basis.scale)
        initialise_eagle3(head, basis.output[basis.vocabulary.ids], basis.target_norm, seed)
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
        shape = facts["shape"]
        residual = "normalised" if shape["norm_before_residual"] else "fused"
        return f"""hidden states (inputs of layers {listed(shape["aux_layers"])}): {decoder_sizes(facts)} The residual
        stream starts from the {residual} state. {drafted_tokens(facts)} Format: `speculators` (`eagle3`)."""
