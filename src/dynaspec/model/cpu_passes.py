"""Passes of a decoder on CPU, each in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .attention.base import KV
from .batch import ForwardBatch
from .compiled import NO_TAPS, CacheAddresses, CompiledDecoder
from .kernels.decode import PassRows, decode, repeat
from .kernels.layers import move
from .taps import Taps


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
