"""The decoder: embedding, layers, final norm and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from .attention.base import KV, AttentionBackend, AttentionMeta, Shape, bytes_per_block
from .batch import ForwardBatch
from .compiled import CompiledDecoder
from .config import DecoderConfig
from .layer import Weights
from .linear import Linear
from .ops import Ops
from .stack import OpsStack
from .taps import Taps


class Decoder(ABC):
    """A decoder-only Transformer on paged KV, whatever runs its passes. See ``Model`` for the interface."""

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
    def forward(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor:
        """See ``Model``."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model``."""

    @abstractmethod
    def move_kv(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``Model``."""

    @abstractmethod
    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """See ``Model``."""

    @abstractmethod
    def first_layers(self, count: int) -> Decoder:
        """The same decoder without the layers behind the first ``count``; it shares weights, and takes the same KV."""

    def _first(self, count: int) -> tuple[DecoderConfig, Weights]:
        """Configuration and weights of ``first_layers``."""
        return replace(self.config, num_layers=count), replace(self.weights, layers=self.weights.layers[:count])


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
        return self.run(batch.tokens, self.attention.prepare(batch), kv, taps)

    def run(
        self, tokens: torch.Tensor, meta: AttentionMeta, kv: Sequence[KV], taps: Taps | None = None
    ) -> torch.Tensor:
        """``forward`` without its host work: reads nothing but tensors, so that a device can record it."""
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
