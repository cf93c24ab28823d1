"""EAGLE heads (Li et al., 2401.15077): a decoder layer that guesses the target's next final state.

The target's own output layer makes the logits of that guess. Trained like the published ones, on both the states and
the tokens, and like EAGLE-3 on several drafts in a row, as HASS (2408.15766) first did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynaspec.train.heads.basis import Basis
from dynaspec.train.heads.card import decoder_sizes
from dynaspec.train.heads.decoder import DecoderHead, Layer
from dynaspec.train.heads.export import decoder_config
from dynaspec.train.heads.kind import ReadsLastState
from dynaspec.train.heads.shape import HeadShape


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
        """See :class:`DecoderHead`."""
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
        """See :class:`TrainedHead`."""
        unit, scale = self.get_buffer("unit"), self.get_buffer("scale")
        embedded = self.get_buffer("embedding_size").expand_as(scale)
        inward = {f"layers.0.self_attn.{name}_proj.weight": 1 / unit for name in "qkv"}
        outward = {f"layers.0.{name}.weight": unit for name in ("self_attn.o_proj", "mlp.down_proj")}
        return {"fc.weight": unit / torch.cat([embedded, scale]), **inward, **outward}


@torch.no_grad()
def initialise(head: EagleHead, seed: int) -> None:
    """Start weights: the guess is the state that the head was given, and noise."""
    head.initialise_layer(torch.Generator().manual_seed(seed))
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -head.shape.hidden :] += torch.diag(head.get_buffer("scale") / head.get_buffer("unit"))


@dataclass(frozen=True, slots=True)
class Eagle(ReadsLastState):
    """See ``kind.Kind``. ``regression`` is the weight of the loss on states beside that on tokens."""

    regression: float = 10.0
    method = "eagle"
    title = "EAGLE head"

    @property
    def options(self) -> dict[str, Any]:
        """See ``Kind``."""
        return {"regression": self.regression}

    def head(self, basis: Basis, seed: int) -> EagleHead:
        """See ``Kind``."""
        head = EagleHead(basis.shape, basis.embedding, basis.output, basis.scale, self.regression)
        initialise(head, seed)
        return head

    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """See ``Kind``; the format is the authors'."""
        return {**decoder_config(basis.shape), "torch_dtype": "bfloat16", "bias": False}

    def described(self, facts: Mapping[str, Any]) -> str:
        """See ``Kind``."""
        return f"""last hidden state: {decoder_sizes(facts)} It guesses the next such state, and the target's output
        layer turns that into tokens. Format: the authors' (EAGLE-1, EAGLE-2), without a bias."""
