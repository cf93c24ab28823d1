"""An EAGLE-3 head as its checkpoint describes it, one chain and one token at a time, from plain tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dynaspec.train.heads.shape import HeadShape


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half).double() * 2 / x.shape[-1])
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], dim=-1)


def draft_logits(
    weights: Mapping[str, Tensor],
    shape: HeadShape,
    embedding: Tensor,
    tokens: Tensor,
    aux: Tensor,
    start: int,
    depth: int,
) -> Tensor:
    """[draft_vocab]: logits of draft ``depth`` of the chain that starts at row ``start``; the drafts before it are the
    text's own. ``aux`` [rows, aux_width] are the target's states as they are."""
    w = {k.removeprefix("layers.0."): v.float() for k, v in weights.items()}
    d = shape.head_dim
    keys: list[Tensor] = []
    values: list[Tensor] = []
    logits = hidden = torch.empty(0)
    for position in range(start + depth + 1):
        g = w["fc.weight"] @ aux[position].float() if position <= start else hidden
        h = norm(g, w["hidden_norm.weight"], shape.eps)
        both = torch.cat([norm(embedding[tokens[position + 1]], w["input_layernorm.weight"], shape.eps), h])
        q = turn((w["self_attn.q_proj.weight"] @ both).view(-1, d), position, shape.rope_theta)
        keys.append(turn((w["self_attn.k_proj.weight"] @ both).view(-1, d), position, shape.rope_theta))
        values.append((w["self_attn.v_proj.weight"] @ both).view(-1, d))
        mixed = []
        for i in range(shape.heads):
            j = i * shape.kv_heads // shape.heads
            seen = torch.softmax(torch.stack([q[i] @ k[j] for k in keys]) / d**0.5, dim=0)
            mixed.append(sum(p * v[j] for p, v in zip(seen, values, strict=True)))
        x = (h if shape.norm_before_residual else g) + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = norm(x, w["post_attention_layernorm.weight"], shape.eps)
        inner = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ y) * (w["mlp.up_proj.weight"] @ y)
        hidden = x + w["mlp.down_proj.weight"] @ inner
        logits = w["lm_head.weight"] @ norm(hidden, w["norm.weight"], shape.eps)
    return logits
