"""The decoder: every supported family is this code with other data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .attention.base import KV, AttentionBackend, AttentionMeta, Shape
from .base import ForwardOutput
from .batch import ForwardBatch
from .config import DecoderConfig
from .linear import Linear
from .ops import Norm, Ops, RopeTable


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, ready to run."""

    attention_norm: Norm
    qkv: Linear
    """→ [R, (heads + 2 kv heads) · head_dim]"""
    out: Linear
    up: Linear
    """→ [R, 2 intermediate] for gated MLPs (gate first), otherwise [R, intermediate]"""
    down: Linear
    window: int | None
    mlp_norm: Norm | None = None
    """None where attention and MLP run side by side behind one norm."""
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a decoder, ready to run."""

    embedding: torch.Tensor
    """[vocabulary, hidden]"""
    position_embedding: torch.Tensor | None
    """[positions, hidden], row 0 for position 0"""
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear


class Decoder:
    """A decoder-only Transformer on paged KV. See ``Model`` for the interface."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        attention: AttentionBackend,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self._weights = weights
        self._attention = attention
        self._ops = ops
        self._rope = RopeTable.build(config.rope, config.max_position, device) if config.rope else None
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        shapes = attention.kv_shape(1)
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        self.kv_bytes_per_block = config.num_layers * elements * dtype.itemsize

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]:
        """See ``Model``."""
        return self._attention.kv_shape(num_blocks)

    def forward(self, batch: ForwardBatch, kv: Sequence[KV], taps: Sequence[int] = ()) -> ForwardOutput:
        """See ``Model``."""
        return self.run(batch.tokens, self._attention.prepare(batch), kv, taps)

    def run(
        self, tokens: torch.Tensor, meta: AttentionMeta, kv: Sequence[KV], taps: Sequence[int] = ()
    ) -> ForwardOutput:
        """``forward`` without its host work: reads nothing but tensors, so that a device can record it."""
        x = self._embed(tokens, meta.positions)
        tapped = {}
        delta: torch.Tensor | None = None  # the previous layer's output, added together with the next norm
        for index, layer in enumerate(self._weights.layers):
            delta = self._layer(layer, x, delta, kv[index], meta)
            if index in taps:
                tapped[index] = x + delta
        return ForwardOutput(self._normed(x, delta, self._weights.final_norm), tapped)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model``."""
        logits = self._weights.head(hidden).float()
        cap = self.config.logits_softcap
        return logits if cap is None else self._ops.softcap(logits, cap)

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self._weights.embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self._weights.position_embedding is not None:
            x = x + F.embedding(positions, self._weights.position_embedding)
        return x

    def _normed(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """x += delta, then its norm."""
        return self._ops.norm(x, norm) if delta is None else self._ops.add_norm(x, delta, norm)

    def _layer(
        self, layer: Layer, x: torch.Tensor, delta: torch.Tensor | None, kv: KV, meta: AttentionMeta
    ) -> torch.Tensor:
        """Adds ``delta`` to x; returns what the layer's last part wants to add."""
        h = self._normed(x, delta, layer.attention_norm)
        attended = self._attend(layer, h, kv, meta)
        if layer.mlp_norm is None:
            return attended + self._mlp(layer, h)
        if self.config.parallel_residual:
            return attended + self._mlp(layer, self._ops.norm(x, layer.mlp_norm))
        if layer.post_attention_norm is not None:
            attended = self._ops.norm(attended, layer.post_attention_norm)
        h = self._ops.add_norm(x, attended, layer.mlp_norm)
        out = self._mlp(layer, h)
        return out if layer.post_mlp_norm is None else self._ops.norm(out, layer.post_mlp_norm)

    def _attend(self, layer: Layer, h: torch.Tensor, kv: KV, meta: AttentionMeta) -> torch.Tensor:
        heads, kv_heads, _ = self._heads
        qkv = layer.qkv(h).view(h.shape[0], -1, self.config.head_dim)
        q, k, v = torch.split(qkv, self._heads, 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._ops.head_norm(q, layer.query_norm)
            self._ops.head_norm(k, layer.key_norm)
        if self._rope is not None:
            self._ops.rotate(qkv[:, : heads + kv_heads], meta.positions, self._rope)
        return layer.out(self._attention.attend(q, k, v, kv, meta, layer.window))

    def _mlp(self, layer: Layer, h: torch.Tensor) -> torch.Tensor:
        return layer.down(self._ops.activate(self.config.mlp, layer.up(h)))
