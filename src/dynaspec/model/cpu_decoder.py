"""A decoder on CPU in float32, whose passes are one compiled call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .attention.base import KV, AttentionBackend, AttentionSpec
from .attention.cpu import attention_work
from .batch import ForwardBatch
from .compiled import NO_TAPS, CacheAddresses, CompiledDecoder
from .config import DecoderConfig, MlpKind
from .decoder import Decoder, Layer, Weights
from .kernels import row_ops
from .kernels.decode import PassRows, decode, move, repeat
from .kernels.team import team_size
from .linear import Linear
from .ops import Norm, RopeTable
from .packed import PackedLinear
from .taps import Taps

_ACTIVATIONS: dict[MlpKind, int] = {
    "gated_silu": row_ops.SILU,
    "gated_gelu_tanh": row_ops.GELU_TANH,
    "relu": row_ops.RELU,
    "gelu": row_ops.GELU,
    "gelu_tanh": row_ops.GELU_TANH,
}
_NONE, _NO_ANGLES = np.empty((0, 0), np.float32), np.empty((1, 0), np.float32)


class CpuDecoder(Decoder):
    """The same bits for a row in any batch and on any number of threads."""

    compiled: CompiledDecoder

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        attention: AttentionBackend,
        product_dtype: torch.dtype,
        compiled: CompiledDecoder,
    ) -> None:
        """
        Args:
            weights: packed matrices and float32 norms.
            compiled: what ``compile_decoder`` makes of them.
        """
        super().__init__(config, weights, attention, torch.device("cpu"), torch.float32, product_dtype)
        self.compiled = compiled
        self._caches = CacheAddresses()

    def forward(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor:
        """See ``Model``."""
        return torch.from_numpy(decode(*self._arguments(batch, kv, taps)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model``."""
        logits = self.weights.head(hidden)
        if self.config.logits_softcap is not None:
            row_ops.softcap(logits.numpy().reshape(-1), self.config.logits_softcap)
        return logits

    def move_kv(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``Model``."""
        move(self.compiled, self._caches.of(kv), kv[0][0].shape[0], source.numpy(), target.numpy())

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """See ``Model``."""
        repeat(*self._arguments(batch, kv, None), passes)

    def first_layers(self, count: int) -> CpuDecoder:
        """See ``Decoder``."""
        compiled = self.compiled._replace(layers=self.compiled.layers[:count])
        return CpuDecoder(*self._first(count), self.attention, self.product_dtype, compiled)

    def _arguments(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None) -> tuple[Any, ...]:
        kept = NO_TAPS if taps is None else (taps.arena.numpy(), taps.columns)
        return self.compiled, *kept, self._caches.of(kv), kv[0][0].shape[0], PassRows.of(batch)


def compile_decoder(
    config: DecoderConfig,
    layers: Sequence[Layer],
    spec: AttentionSpec,
    embedding: torch.Tensor,
    head: Linear,
    final_norm: Norm | None,
    position: torch.Tensor | None = None,
) -> CompiledDecoder:
    """A decoder for compiled code, which reads the weights where they are: the caller keeps them alive.

    Args:
        layers: of packed matrices and float32 norms.
        spec: of the attention, which is ``CpuAttention``.
        embedding, head, final_norm, position: see ``Weights``; a head on hidden states may have no final norm.
    """
    ropes = RopeTable.of(config, torch.device("cpu"))
    return CompiledDecoder(
        embedding=embedding.numpy(),
        embedding_scale=np.float32(config.embedding_scale),
        position_embedding=_NONE if position is None else position.numpy(),
        layers=np.array([_row(layer, spec, ropes) for layer in layers], np.int64),
        ends=np.array([*matrix_row(head), *norm_row(final_norm)], np.int64),
        heads=(config.num_heads, config.num_kv_heads, config.head_dim),
        is_gated=config.gated,
        activation=_ACTIVATIONS[config.mlp],
        parallel=config.parallel_residual,
        eps=config.norm_eps,
        cos=np.concatenate([rope.cos.numpy() for rope in ropes]) if ropes else _NO_ANGLES,
        sin=np.concatenate([rope.sin.numpy() for rope in ropes]) if ropes else _NO_ANGLES,
        interleaved=bool(ropes) and ropes[0].interleaved,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
        threads=team_size(torch.get_num_threads()),
        attention_work=attention_work(spec),
        final_eps=0.0 if final_norm is None else final_norm.eps,
        logits_softcap=config.logits_softcap or 0.0,
    )


def _row(layer: Layer, spec: AttentionSpec, ropes: Sequence[RopeTable]) -> list[int]:
    """A layer's row of ``CompiledDecoder.layers``."""
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


def matrix_row(linear: Linear) -> tuple[int, int, int, int, int]:
    """What describes a matrix in a table of ``kernels.decode``."""
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"a layer has a {type(linear).__name__}; expected a PackedLinear")
    return linear.packed.ctypes.data, linear.form, linear.arithmetic, linear.bias.ctypes.data, linear.width


def norm_row(norm: Norm | None) -> tuple[int, int]:
    """What describes a norm there; None = none."""
    if norm is None:
        return 0, 0
    return norm.weight.data_ptr(), 0 if norm.bias is None else norm.bias.data_ptr()
