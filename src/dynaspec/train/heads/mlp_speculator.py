"""An MLP speculator (Wertheimer et al., 2404.19124): a small recurrent network on the target's last final state.

With n steps, inner width w, state s and the newest token t, step i is

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
from .head import StateHead
from .kind import Kind
from .shape import HeadShape

EPS = 1e-6
INPUT_SCALE: float = 0.5**0.5


class BiasedNorm(nn.Module):
    """x / rms(x) · weight + bias, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] to float32 of the same shape."""
        normed: Tensor = nn.functional.rms_norm(x.float(), x.shape[-1:], self.weight, EPS)
        return normed + self.bias


class MlpHead(StateHead):
    """Embedding and output layer have names by which the optimizer knows such; see :meth:`stored_name`."""

    def __init__(self, shape: HeadShape, scale: Tensor, steps: int, inner: int, seed: int) -> None:
        super().__init__(torch.arange(shape.vocab), shape.vocab, scale)
        self.embed_tokens = nn.Embedding(shape.vocab, inner)
        self.proj = nn.ModuleList([nn.Linear(w, inner, bias=False) for w in (shape.hidden, inner)[:steps]])
        self.ln = BiasedNorm(inner)
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
        normed: Tensor = nn.functional.rms_norm(states, states.shape[-1:], eps=EPS)
        return normed * INPUT_SCALE

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
    """See ``kind.Kind``. So many ``steps`` of width ``inner``."""

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
