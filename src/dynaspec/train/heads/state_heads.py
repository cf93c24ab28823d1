"""Medusa heads (Cai et al., 2401.10774): each guesses a token of its own, from the same state of the target.

As Medusa-1: the target stays what it is, and a head begins as the target's output layer does. They share one output
layer over the draft vocabulary, as vLLM's format can say: with one each, the file would be mostly that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .basis import Basis
from .export import drafted_tokens
from .head import StateHead
from .kind import Kind
from .shape import DraftVocabulary, HeadShape


class Block(nn.Module):
    """Residual layers x + SiLU(W x), all W being zero at the start."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden, bias=False) for _ in range(layers)])
        for weight in self.layers.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden], both ways."""
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class MedusaHeads(StateHead):
    """Parameters have the names of the checkpoint."""

    def __init__(
        self, shape: HeadShape, vocabulary: DraftVocabulary, scale: Tensor, heads: int, layers: int, output: Tensor
    ) -> None:
        """``output`` [draft_vocab, hidden] are the target's rows of the draft vocabulary."""
        super().__init__(vocabulary.ids, shape.vocab, scale)
        self.blocks = nn.ModuleList([Block(shape.hidden, layers) for _ in range(heads)])
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(output.float())

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight

    def begin(self, states: Tensor) -> Tensor:
        return states

    def step(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`StateHead`: no head sees another's token."""
        return state, self.blocks[depth](state)

    def maps(self) -> dict[str, Tensor]:
        """``token_map``, unless everything can be drafted."""
        return {"token_map": self.get_buffer("ids").cpu()} if self.partial else {}


@dataclass(frozen=True, slots=True)
class Medusa(Kind):
    """See ``kind.Kind``. So many ``heads``, each of so many ``layers``."""

    heads: int = 4
    layers: int = 1
    method = "medusa"
    title = "Medusa heads"

    @property
    def options(self) -> dict[str, Any]:
        return {"heads": self.heads, "layers": self.layers}

    def head(self, basis: Basis, seed: int) -> MedusaHeads:
        """See ``Kind``; nothing in them is random."""
        output = basis.output[basis.vocabulary.ids]
        return MedusaHeads(basis.shape, basis.vocabulary, basis.scale, self.heads, self.layers, output)

    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """See ``Kind``; the format is vLLM's."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "torch_dtype": "bfloat16",
            "hidden_size": basis.shape.hidden,
            "vocab_size": basis.shape.vocab,
            "truncated_vocab_size": basis.shape.draft_vocab,
            "num_heads": self.heads,
            "num_hidden_layers": self.layers,
            "medusa_fc_bias": False,
            "original_lm_head": True,
            "base_model_name_or_path": verifier,
        }

    def described(self, facts: Mapping[str, Any]) -> str:
        made = facts["options"]
        return f"""last hidden state: {made["heads"]} heads of {made["layers"]} residual layer(s) of width
        {facts["shape"]["hidden"]}, and one output layer for all of them; {facts["parameters"] / 1e6:.2f} M parameters
        in bfloat16. {drafted_tokens(facts)} Format: Medusa's as vLLM has it."""
