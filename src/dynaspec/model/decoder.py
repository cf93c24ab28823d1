"""The decoder: embedding, layers, final norm and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from .attention.base import KV, AttentionBackend, AttentionMeta, Shape
from .batch import ForwardBatch
from .compiled import CompiledDecoder
from .config import DecoderConfig
from .layer import Weights
from .linear import Linear
from .ops import RowOps
from .stack import LayerStack
from .taps import Taps


class Passes(Protocol):
    """Whole passes, see ``cpu_stack``."""

    decoder: CompiledDecoder

    def of_first_layers(self, count: int) -> Passes:
        """Of the same decoder, with so many of its layers."""
        ...

    def run(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor: ...

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None: ...

    def move(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None: ...


class Decoder:
    """A decoder-only Transformer on paged KV. See ``Model`` for the interface."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        attention: AttentionBackend,
        stack: LayerStack,
        ops: RowOps,
        device: torch.device,
        dtype: torch.dtype,
        product_dtype: torch.dtype,
        passes: Passes | None = None,
    ) -> None:
        """
        Args:
            stack: the layers of ``weights``, on ``attention``.
            passes: of the same decoder, faster.
        """
        self.config = config
        self.device = device
        self.dtype, self.product_dtype = dtype, product_dtype
        self._passes = passes
        self.compiled = None if passes is None else passes.decoder
        self._weights = weights
        self.attention = attention
        self._stack = stack
        self._ops = ops
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        shapes = attention.kv_shape(1)
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        self.kv_bytes_per_block = config.num_layers * elements * dtype.itemsize

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]:
        """See ``Model``."""
        return self.attention.kv_shape(num_blocks)

    def forward(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor:
        """See ``Model``."""
        if self._passes is not None:
            return self._passes.run(batch, kv, taps)
        return self.run(batch.tokens, self.attention.prepare(batch), kv, taps)

    def move_kv(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``Model``."""
        if self._passes is not None:
            self._passes.move(kv, source, target)
            return
        for layer in kv:
            self.attention.move(layer, source, target)

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """See ``Model``."""
        if self._passes is not None:
            self._passes.repeat(batch, kv, passes)
            return
        for _ in range(passes):
            self.logits(self.forward(batch, kv))

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
        hidden = self._ops.add_norm(x, delta, self._weights.final_norm)
        if taps is not None:
            taps.keep(layers + 1, hidden, meta.slots)
        return hidden

    def first_layers(self, count: int) -> Decoder:
        """The same decoder without the layers behind the first ``count``; it shares weights, and takes the same KV."""
        return Decoder(
            replace(self.config, num_layers=count),
            replace(self._weights, layers=self._weights.layers[:count]),
            self.attention,
            self._stack,
            self._ops,
            self.device,
            self.dtype,
            self.product_dtype,
            None if self._passes is None else self._passes.of_first_layers(count),
        )

    @property
    def embedding(self) -> torch.Tensor:
        """See ``Model``."""
        return self._weights.embedding

    @property
    def head(self) -> Linear:
        """See ``Model``."""
        return self._weights.head

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
