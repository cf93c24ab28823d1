"""The head itself: tensor names are those of its checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynaspec.train.eagle3.shape import HeadShape


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] to float32 of the same shape."""
        normed: Tensor = _Normalise.apply(x.float(), self._eps)  # type: ignore[no-untyped-call]
        return normed * self.weight


class _Normalise(torch.autograd.Function):
    """x / rms(x) in few passes over the memory: PyTorch's own takes a dozen on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        """[…, width] float32."""
        width = x.shape[-1]
        inverse = (torch.linalg.vecdot(x, x)[..., None] / width + eps).rsqrt_()
        normed: Tensor = x * inverse
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """The gradient loses its part along the output."""
        normed, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(upstream, normed)[..., None] / -normed.shape[-1]
        return torch.addcmul(upstream, normed, along).mul_(inverse), None


class Attention(nn.Module):
    """Projections only; how rows see each other is :mod:`dynaspec.train.eagle3.unroll`'s business."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        double, inner, kv = 2 * shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(double, inner, bias=False)
        self.k_proj = nn.Linear(double, kv, bias=False)
        self.v_proj = nn.Linear(double, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Llama decoder layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        # Nothing but projections reads it, so they can do its weight's work; and the embedding needs no gradient.
        self.input_layernorm.weight.requires_grad_(False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)


class Head(nn.Module):
    """An EAGLE-3 head; the embedding is the target's, frozen and not among the parameters.

    ``fc`` reads hidden states divided by ``aux_scale`` [aux_width], as the cache of states holds
    them; the checkpoint gets ``fc`` with that division folded in.
    """

    def __init__(self, shape: HeadShape, embedding: Tensor, aux_scale: Tensor) -> None:
        """``embedding`` is [vocab, hidden]."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.aux_width, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("aux_scale", aux_scale.float(), persistent=False)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def layer(self) -> Layer:
        """The only decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def checkpoint(self) -> dict[str, Tensor]:
        """bfloat16 tensors under their names in an EAGLE-3 checkpoint, without the maps."""
        state = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        scale: Tensor = self.get_buffer("aux_scale")
        state["fc.weight"] /= scale
        return {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}


def rotary_tables(shape: HeadShape) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim], float32, for heads whose halves rotate against each other."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angles = torch.arange(shape.positions, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [rows, heads, head_dim] by the angles of its rows (cos, sin: [rows, head_dim]); dtype of ``x``."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos[:, None], turned, sin[:, None]).to(x.dtype)


@torch.no_grad()
def initialise(
    head: Head, target_head: Tensor, target_norm: Tensor | None, seed: int, head_scale: float = 0.25
) -> None:
    """Start weights: the fused state is the latest of the target's plus noise, lm_head the target's.

    Args:
        target_head: [draft_vocab, hidden], the target's rows of the draft vocabulary.
        target_norm: [hidden], weight of the target's final norm, if it has one.
        head_scale: at 1, the loss begins far above that of a uniform guess, as untrained states mean nothing to it.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2 and name != "lm_head.weight":
            std = parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    late = head.get_buffer("aux_scale")[-head.shape.hidden :]
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -head.shape.hidden :] += torch.diag(late / late.mean()).to(head.fc.weight)
    head.lm_head.weight.copy_(target_head.float() * head_scale)
    if target_norm is not None:
        head.norm.weight.copy_(target_norm.float())
