"""The layers of a decoder on CPU, and whole passes of it, each in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .attention.base import KV, AttentionSpec
from .attention.cpu import CpuMeta, attention_work
from .batch import ForwardBatch
from .compiled import NO_TAPS, CacheAddresses, CompiledDecoder
from .config import DecoderConfig, MlpKind
from .kernels import elementwise
from .kernels import layers as kernels
from .kernels.decode import PassRows, decode, repeat
from .kernels.layers import move
from .kernels.team import team_size
from .layer import Layer
from .linear import Linear
from .ops import Norm, RopeTable
from .packed import PackedLinear
from .taps import Taps

_ACTIVATIONS: dict[MlpKind, int] = {
    "gated_silu": elementwise.SILU,
    "gated_gelu_tanh": elementwise.GELU_TANH,
    "relu": elementwise.RELU,
    "gelu": elementwise.GELU,
    "gelu_tanh": elementwise.GELU_TANH,
}
_NONE, _NO_ANGLES = np.empty((0, 0), np.float32), np.empty((1, 0), np.float32)


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
        self._caches = CacheAddresses()
        self._model = CompiledDecoder(
            embedding=_NONE,
            embedding_scale=np.float32(1.0),
            position_embedding=_NONE,
            layers=np.array([_row(layer, spec, ropes) for layer in layers], np.int64),
            ends=np.empty(0, np.int64),
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
            threads=team_size(threads),
            attention_work=attention_work(spec),
            final_eps=0.0,
            logits_softcap=0.0,
        )
        """The layers alone; ``compiled`` knows what is around them."""

    def run(self, x: torch.Tensor, delta: torch.Tensor, layers: range, kv: Sequence[KV], meta: CpuMeta) -> torch.Tensor:
        """See ``LayerStack``."""
        rows, which = (x.numpy(), delta.numpy()), np.arange(layers.start, layers.stop)
        caches, blocks, work = self._caches.of(kv), kv[0][0].shape[0], kernels.PassWork(*meta.work)
        kernels.run(self._model, *rows, which, *NO_TAPS, caches, blocks, work)
        return delta

    def compiled(
        self,
        config: DecoderConfig,
        embedding: torch.Tensor,
        head: Linear,
        final_norm: Norm | None,
        position: torch.Tensor | None = None,
    ) -> CompiledDecoder:
        """The decoder that these layers are of, for compiled code.

        Args:
            embedding, head, final_norm, position: see ``Weights``; a head on hidden states may have no final norm.
        """
        return self._model._replace(
            embedding=embedding.numpy(),
            embedding_scale=np.float32(config.embedding_scale),
            position_embedding=_NONE if position is None else position.numpy(),
            ends=np.array([*matrix_row(head), *norm_row(final_norm)], np.int64),
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
    """What describes a matrix in a table of ``kernels.layers``."""
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"a layer has a {type(linear).__name__}; expected a PackedLinear")
    return linear.packed.ctypes.data, linear.form, linear.arithmetic, linear.bias.ctypes.data, linear.width


def norm_row(norm: Norm | None) -> tuple[int, int]:
    """What describes a norm there; None = none."""
    if norm is None:
        return 0, 0
    return norm.weight.data_ptr(), 0 if norm.bias is None else norm.bias.data_ptr()


class CompiledPasses:
    """What a pass from Python does. The same bits."""

    def __init__(self, decoder: CompiledDecoder) -> None:
        self.decoder = decoder
        self._caches = CacheAddresses()

    def of_first_layers(self, count: int) -> CompiledPasses:
        """See ``Passes``."""
        return CompiledPasses(self.decoder._replace(layers=self.decoder.layers[:count]))

    def run(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor:
        """[R, hidden] after the final norm; writes the rows' KV and the hidden states that ``taps`` wants."""
        return torch.from_numpy(decode(*self._arguments(batch, kv, taps)))

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """The same pass, with its logits, so many times in one call."""
        repeat(*self._arguments(batch, kv, None), passes)

    def move(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``Model.move_kv``."""
        move(self.decoder, self._caches.of(kv), len(kv[0][0]), source.numpy(), target.numpy())

    def _arguments(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None) -> tuple[Any, ...]:
        kept = NO_TAPS if taps is None else (taps.arena.numpy(), taps.columns)
        return self.decoder, *kept, self._caches.of(kv), len(kv[0][0]), PassRows.of(batch)
