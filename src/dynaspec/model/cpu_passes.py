"""Passes of a decoder on CPU, each in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attention.base import KV
from .batch import ForwardBatch
from .compiled import CacheAddresses, CompiledDecoder
from .kernels.decode import decode


class CompiledPasses:
    """What a pass from Python does, without trees and without taps. The same bits."""

    def __init__(self, decoder: CompiledDecoder) -> None:
        self.decoder = decoder
        self._caches = CacheAddresses()

    def run(self, batch: ForwardBatch, kv: Sequence[KV]) -> torch.Tensor:
        """[R, hidden] after the final norm; writes the rows' KV."""
        hidden = decode(
            self.decoder,
            self._caches.of(kv),
            len(kv[0][0]),
            batch.tokens.numpy(),
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            batch.slots,
            batch.positions,
        )
        return torch.from_numpy(hidden)
