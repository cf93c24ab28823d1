"""A decoder: what the engine and the proposers see of it, its weights, and its passes as one operation after the other.

Every supported family is this code with other data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from .attention.base import KV, AttentionBackend, AttentionMeta, Shape, bytes_per_block
from .batch import ForwardBatch
from .compiled import CompiledDecoder
from .config import DecoderConfig
from .linear import Linear
from .ops import Norm, Ops, RopeTable
from .taps import Taps


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, ready to run."""

    attention_norm: Norm | None
    """None in the first layer of some heads, whose input is not normed, or already is."""
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


class Model(Protocol):
    """A decoder that reads and writes a paged KV cache, which the caller owns."""

    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    """Of activations, and of the KV cache unless that is told otherwise."""
    product_dtype: torch.dtype
    """What the inputs and weights of matrix products are rounded to: ``dtype``, or bfloat16 where that is float32."""
    kv_bytes_per_block: int
    """Bytes of one KV block over all layers, in the model's dtype."""
    compiled: CompiledDecoder | None
    """The same model for compiled code; None where its passes have to be run from Python."""

    @property
    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden] of its tokens, in its dtype, before any scaling."""
        ...

    @property
    def head(self) -> Linear:
        """[R, hidden] after the final norm → [R, vocabulary], before any capping."""
        ...

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]:
        """Shapes of the key and of the value cache of one layer; their dtype is the model's, or bfloat16."""
        ...

    def forward(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor:
        """Runs all rows of the batch and writes their KV.

        Args:
            batch: the rows; token ids within the vocabulary, positions below ``config.max_position``.
            kv: key and value cache of every layer.
            taps: hidden states to keep at the rows' slots.

        Returns:
            [R, hidden] after the final norm, in the model's dtype, without the rows of ``batch.kv_only``.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [r, hidden] → logits [r, vocabulary], float32."""
        ...

    def move_kv(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies the KV of all layers from the slots ``source`` [n] to ``target`` [n], int64 on the model's device; all
        is read before anything is written."""
        ...

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """The same pass, with its logits, so many times, as those of a draft follow each other: to see what they take.

        Args:
            batch, kv: see ``forward``.
        """
        ...


class Decoder(Model):
    """A decoder-only Transformer on paged KV, whatever runs its passes."""

    compiled: CompiledDecoder | None = None

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        attention: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        product_dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype, self.product_dtype = dtype, product_dtype
        self.attention = attention
        self.kv_bytes_per_block = bytes_per_block(attention, config.num_layers, dtype)
        self.weights = weights

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]:
        """See ``Model``."""
        return self.attention.kv_shape(num_blocks)

    @property
    def embedding(self) -> torch.Tensor:
        """See ``Model``."""
        return self.weights.embedding

    @property
    def head(self) -> Linear:
        """See ``Model``."""
        return self.weights.head

    @abstractmethod
    def first_layers(self, count: int) -> Decoder:
        """The same decoder without the layers behind the first ``count``; it shares weights, and takes the same KV."""

    def _first(self, count: int) -> tuple[DecoderConfig, Weights]:
        """Configuration and weights of ``first_layers``."""
        return replace(self.config, num_layers=count), replace(self.weights, layers=self.weights.layers[:count])


class OpsStack:
    """The layers of a decoder, of single operations: any device and dtype."""

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


class OpsDecoder(Decoder):
    """One operation after the other: any device and dtype."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        attention: AttentionBackend,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        product_dtype: torch.dtype,
    ) -> None:
        super().__init__(config, weights, attention, device, dtype, product_dtype)
        self._stack = OpsStack(config, weights.layers, attention, ops, device)
        self._ops = ops
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))

    def forward(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor:
        """See ``Model``."""
        return batch.without_kv_only(self.run(batch.tokens, self.attention.prepare(batch), kv, taps))

    def run(
        self, tokens: torch.Tensor, meta: AttentionMeta, kv: Sequence[KV], taps: Taps | None = None
    ) -> torch.Tensor:
        """``forward`` of all rows without its host work: reads nothing but tensors, so that a device can record it."""
        x = self._embed(tokens, meta.positions)
        delta, first, layers = torch.zeros_like(x), 0, self.config.num_layers
        inner = () if taps is None else sorted(state for state in taps.states if state < layers)
        for state in (*inner, layers):
            if state > first:
                delta = self._stack.run(x, delta, range(first, state), kv, meta)
            if taps is not None:
                taps.keep(state, x + delta, meta.slots)
            first = state
        hidden = self._ops.add_norm(x, delta, self.weights.final_norm)
        if taps is not None:
            taps.keep(layers + 1, hidden, meta.slots)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model``."""
        logits = self.weights.head(hidden).float()
        cap = self.config.logits_softcap
        return logits if cap is None else self._ops.softcap(logits, cap)

    def move_kv(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``Model``."""
        for layer in kv:
            self.attention.move(layer, source, target)

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """See ``Model``."""
        for _ in range(passes):
            self.logits(self.forward(batch, kv))

    def first_layers(self, count: int) -> OpsDecoder:
        """See ``Decoder``."""
        return OpsDecoder(*self._first(count), self.attention, self._ops, self.device, self.dtype, self.product_dtype)

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens, self.weights.embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if self.weights.position_embedding is not None:
            x = x + F.embedding(positions, self.weights.position_embedding)
        return x


def ops_for(device: torch.device) -> Ops:
    """The fastest operations for a device."""
    if device.type != "cuda":
        return Ops()
    from .cuda_ops import CudaOps  # needs Triton

    return CudaOps()
