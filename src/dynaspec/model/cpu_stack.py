"""The layers of a decoder on CPU in float32, all in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .attention.base import KV, AttentionSpec
from .attention.cpu import CpuMeta, attention_work
from .compiled import NO_TAPS, CacheAddresses, CompiledDecoder
from .config import DecoderConfig, MlpKind
from .kernels import elementwise
from .kernels import layers as kernels
from .kernels.team import team_size
from .layer import Layer, Weights
from .linear import Linear
from .ops import Norm, RopeTable
from .packed import PackedLinear

_ACTIVATIONS: dict[MlpKind, int] = {
    "gated_silu": elementwise.SILU,
    "gated_gelu_tanh": elementwise.GELU_TANH,
    "relu": elementwise.RELU,
    "gelu": elementwise.GELU,
    "gelu_tanh": elementwise.GELU_TANH,
}
_NO_ANGLES = np.empty((1, 0), np.float32)


class CpuStack:
    """See ``LayerStack``. The same bits for a row in any batch and on any number of threads."""

    def __init__(self, config: DecoderConfig, layers: Sequence[Layer], spec: AttentionSpec, threads: int) -> None:
        """
        Args:
            layers: of packed matrices and float32 norms.
            spec: of the attention, which is ``CpuAttention``.
        """
        self._layers = tuple(layers)  # keeps alive what the table points to
        ropes = RopeTable.of(config, torch.device("cpu"))
        self._table = np.array([_row(layer, spec, ropes) for layer in layers], np.int64)
        self._attention_work = attention_work(spec)
        self._caches = CacheAddresses()
        self._settings = (
            (config.num_heads, config.num_kv_heads, config.head_dim),
            config.gated,
            _ACTIVATIONS[config.mlp],
            config.parallel_residual,
            config.norm_eps,
            np.concatenate([rope.cos.numpy() for rope in ropes]) if ropes else _NO_ANGLES,
            np.concatenate([rope.sin.numpy() for rope in ropes]) if ropes else _NO_ANGLES,
            bool(ropes) and ropes[0].interleaved,
            spec.scale,
            spec.softcap or 0.0,
            team_size(threads),
        )

    def run(self, x: torch.Tensor, delta: torch.Tensor, layers: range, kv: Sequence[KV], meta: CpuMeta) -> torch.Tensor:
        """See ``LayerStack``."""
        kernels.run(
            x.numpy(),
            delta.numpy(),
            layers.start,
            layers.stop,
            self._table,
            *NO_TAPS,
            self._caches.of(kv),
            kv[0][0].shape[0],
            *self._settings,
            *meta.work,
        )
        return delta

    def compiled(self, config: DecoderConfig, weights: Weights) -> CompiledDecoder:
        """The decoder that these layers are of, for compiled code."""
        position = weights.position_embedding
        return CompiledDecoder(
            weights.embedding.numpy(),
            np.float32(config.embedding_scale),
            np.empty((0, config.hidden_size), np.float32) if position is None else position.numpy(),
            self._table,
            np.array([*matrix_row(weights.head), *norm_row(weights.final_norm)], np.int64),
            *self._settings,
            self._attention_work,
            weights.final_norm.eps,
            config.logits_softcap or 0.0,
        )


def _row(layer: Layer, spec: AttentionSpec, ropes: Sequence[RopeTable]) -> list[int]:
    """A layer's row of ``kernels.run``'s table."""
    matrices = (layer.qkv, layer.out, layer.up, layer.down)
    norms = (
        layer.attention_norm,
        layer.mlp_norm,
        layer.post_attention_norm,
        layer.post_mlp_norm,
        layer.query_norm,
        layer.key_norm,
    )
    row = [number for matrix in matrices for number in matrix_row(matrix)]
    row += [number for norm in norms for number in norm_row(norm)]
    return [*row, layer.window or 0, spec.hidden_keys, len(ropes[0].cos) if layer.window and len(ropes) > 1 else 0]


def matrix_row(linear: Linear) -> tuple[int, int, int, int]:
    """What describes a matrix in a table of ``kernels.layers``."""
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"a layer has a {type(linear).__name__}; expected a PackedLinear")
    return linear.packed.ctypes.data, linear.packed.shape[2], linear.bias.ctypes.data, linear.width


def norm_row(norm: Norm | None) -> tuple[int, int]:
    """What describes a norm there; None = none."""
    if norm is None:
        return 0, 0
    return norm.weight.data_ptr(), 0 if norm.bias is None else norm.bias.data_ptr()
