"""Heads without KV, on the target's last final state: Medusa's and MLP speculators.

Medusa heads (Cai et al., 2401.10774) each guess a token of their own, from the same state. As Medusa-1: the target
stays what it is, and a head begins as the target's output layer does. They share one output layer over the draft
vocabulary, as vLLM's format can say: with one each, the file would be mostly that.

An MLP speculator (Wertheimer et al., 2404.19124) is a small recurrent network. With n steps, inner width w, state s and
the newest token t, step i is

    s ← GELU(LN(proj_i(s) + (ew / sw) · emb(t))),  logits = head(s)
    sw = 0.5^(0.5 / n),  ew = √((1 − sw²) · w / 2)

from s = the target's state, normed and divided by √2 (``scale_input``). All steps share emb, LN and head, all but the
first proj (``tie_weights``), as both tables hold the target's whole vocabulary. The published recipe trains on the
target's own texts in a second stage; here there is that alone, with the target's distributions for labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .basis import Basis
from .export import drafted_tokens
from .head import Kind, StateHead
from .shape import DraftVocabulary, HeadShape


class _MedusaBlock(nn.Module):
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
        self.blocks = nn.ModuleList([_MedusaBlock(shape.hidden, layers) for _ in range(heads)])
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
    """See ``Kind``. So many ``heads``, each of so many ``layers``."""

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


_EPS = 1e-6
_INPUT_SCALE: float = 0.5**0.5


class _BiasedNorm(nn.Module):
    """x / rms(x) · weight + bias, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] to float32 of the same shape."""
        normed: Tensor = nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight, _EPS)
        return normed + self.bias


class MlpHead(StateHead):
    """Embedding and output layer have names by which the optimizer knows such; see :meth:`stored_name`."""

    def __init__(self, shape: HeadShape, scale: Tensor, steps: int, inner: int, seed: int) -> None:
        super().__init__(torch.arange(shape.vocab), shape.vocab, scale)
        self.embed_tokens = nn.Embedding(shape.vocab, inner)
        self.proj = nn.ModuleList([nn.Linear(w, inner, bias=False) for w in (shape.hidden, inner)[:steps]])
        self.ln = _BiasedNorm(inner)
        self.lm_head = nn.Linear(inner, shape.vocab, bias=False)
        kept = 0.5 ** (0.5 / steps)
        self._embedding_scale = ((1 - kept**2) * inner / 2) ** 0.5 / kept
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight

    def begin(self, states: Tensor) -> Tensor:
        normed: Tensor = nn.functional.rms_norm(states, states.shape[-1:], eps=_EPS)
        return normed * _INPUT_SCALE

    def step(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.proj[min(depth, 1)](state)
        new: Tensor = nn.functional.gelu(self.ln(projected + self._embedding_scale * self.embed_tokens(tokens)))
        return new, new

    def stored_name(self, name: str) -> str:
        """The format numbers everything by step."""
        return {
            "embed_tokens.weight": "emb.0.weight",
            "lm_head.weight": "head.0.weight",
            "ln.weight": "ln.0.weight",
            "ln.bias": "ln.0.bias",
        }.get(name, name)


@dataclass(frozen=True, slots=True)
class MlpSpeculator(Kind):
    """See ``Kind``. So many ``steps`` of width ``inner``."""

    steps: int = 4
    inner: int = 64
    method = "mlp_speculator"
    title = "MLP speculator"

    @property
    def options(self) -> dict[str, Any]:
        return {"steps": self.steps, "inner": self.inner}

    def head(self, basis: Basis, seed: int) -> MlpHead:
        return MlpHead(basis.shape, basis.scale, self.steps, self.inner, seed)

    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """See ``Kind``; the format is IBM's."""
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "torch_dtype": "bfloat16",
            "vocab_size": basis.shape.vocab,
            "emb_dim": basis.shape.hidden,
            "inner_dim": self.inner,
            "n_predict": self.steps,
            "n_candidates": 1,
            "top_k_tokens_per_head": [1] * self.steps,
            "tie_weights": True,
            "scale_input": True,
        }

    def described(self, facts: Mapping[str, Any]) -> str:
        made = facts["options"]
        return f"""last hidden state: {made["steps"]} steps of width {made["inner"]} that share their weights;
        {facts["parameters"] / 1e6:.2f} M parameters in bfloat16. Format: IBM's (FMS)."""
