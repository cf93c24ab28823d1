"""Passes of a decoder on CPU, each in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .attention.base import KV
from .batch import ForwardBatch
from .compiled import CacheAddresses, CompiledDecoder
from .kernels.decode import decode, repeat


class CompiledPasses:
    """What a pass from Python does, without trees and without taps. The same bits."""

    def __init__(self, decoder: CompiledDecoder) -> None:
        self.decoder = decoder
        self._caches = CacheAddresses()

    def run(self, batch: ForwardBatch, kv: Sequence[KV]) -> torch.Tensor:
        """[R, hidden] after the final norm; writes the rows' KV."""
        return torch.from_numpy(decode(*self._arguments(batch, kv)))

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """The same pass, with its logits, so many times in one call."""
        repeat(*self._arguments(batch, kv), passes)

    def _arguments(self, batch: ForwardBatch, kv: Sequence[KV]) -> tuple[Any, ...]:
        rows = batch.query_start, batch.context_lens, batch.block_tables, batch.slots, batch.positions
        return self.decoder, self._caches.of(kv), len(kv[0][0]), batch.tokens.numpy(), *rows
