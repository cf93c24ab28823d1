"""The layers of a decoder, one operation after the other: every supported family is this code with other data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention.base import KV, AttentionBackend, AttentionMeta
from .config import DecoderConfig
from .layer import Layer
from .ops import Ops, RopeTable, TorchOps


class OpsStack:
    """All layers of a decoder, of single operations: any device and dtype."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[Layer],
        attention: AttentionBackend,
        ops: Ops,
        device: torch.device,
    ) -> None:
        self._config = config
        self._layers = layers
        self._attention = attention
        self._ops = ops
        self._ropes = RopeTable.of(config, device)
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]

    def run(
        self, x: torch.Tensor, delta: torch.Tensor, layers: range, kv: Sequence[KV], meta: AttentionMeta
    ) -> torch.Tensor:
        """Runs some layers that follow each other.

        Args:
            x: [R, hidden] the residual stream, in and out.
            delta: [R, hidden] what the layer before wants to add to ``x``, which is done together with the next norm;
                zeros before the first layer. Its memory may be used for the result.
            layers: which.
            kv: key and value cache of every layer.
            meta: from ``prepare`` of the attention backend.

        Returns:
            [R, hidden] what the last of them wants to add.
        """
        for index in layers:
            delta = self._layer(self._layers[index], x, delta, kv[index], meta)
        return delta

    def _layer(self, layer: Layer, x: torch.Tensor, delta: torch.Tensor, kv: KV, meta: AttentionMeta) -> torch.Tensor:
        if layer.attention_norm is None:
            x += delta
            return self.after_norm(layer, x, x, kv, meta)
        return self.after_norm(layer, x, self._ops.add_norm(x, delta, layer.attention_norm), kv, meta)

    def after_norm(self, layer: Layer, x: torch.Tensor, h: torch.Tensor, kv: KV, meta: AttentionMeta) -> torch.Tensor:
        """One layer from its attention's normed input ``h`` [R, in] on; ``x`` as in ``run``."""
        attended = self._attend(layer, h, kv, meta)
        if layer.mlp_norm is None:
            return attended + self._mlp(layer, h)
        if self._config.parallel_residual:
            return attended + self._mlp(layer, self._ops.norm(x, layer.mlp_norm))
        if layer.post_attention_norm is not None:
            attended = self._ops.norm(attended, layer.post_attention_norm)
        h = self._ops.add_norm(x, attended, layer.mlp_norm)
        out = self._mlp(layer, h)
        return out if layer.post_mlp_norm is None else self._ops.norm(out, layer.post_mlp_norm)

    def _attend(self, layer: Layer, h: torch.Tensor, kv: KV, meta: AttentionMeta) -> torch.Tensor:
        heads, kv_heads, _ = self._heads
        qkv = layer.qkv(h).view(h.shape[0], -1, self._config.head_dim)
        q, k, v = torch.split(qkv, self._heads, 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._ops.head_norm(q, layer.query_norm)
            self._ops.head_norm(k, layer.key_norm)
        if self._ropes:
            rope = self._ropes[-1 if layer.window else 0]
            self._ops.rotate(qkv[:, : heads + kv_heads], meta.positions, rope)
        return layer.out(self._attention.attend(q, k, v, kv, meta, layer.window))

    def _mlp(self, layer: Layer, h: torch.Tensor) -> torch.Tensor:
        return layer.down(self._ops.activate(self._config.mlp, layer.up(h)))


def ops_for(device: torch.device) -> Ops:
    """The fastest operations for a device."""
    if device.type != "cuda":
        return TorchOps()
    from .cuda_ops import CudaOps  # needs Triton

    return CudaOps()
