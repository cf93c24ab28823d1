"""Which conversations a step trains on: a pure function of how far the run has come and of the shards there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.errors import ConfigError
from dynaspec.train.heads.cache import Cache

Ref = tuple[int, int]  # shard, conversation in it


@dataclass(slots=True)
class Place:
    """Next conversation: number ``index`` of the order of ``epoch``, drawn over the first ``shards`` shards."""

    epoch: int = 0
    index: int = 0
    shards: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """Micro-batches of one optimizer step; ``chains`` in all of them."""

    micro_batches: tuple[tuple[Ref, ...], ...]
    chains: int


class Plan:
    """Walks through the cache in a new random order each epoch; shards that have come since join at its end."""

    def __init__(self, cache: Cache, place: Place, seed: int, batch_chains: int, micro_chains: int) -> None:
        self._cache, self._seed = cache, seed
        self._batch_chains, self._micro_chains = batch_chains, micro_chains
        self.place = place
        self._order: list[Ref] = []
        self._drawn: tuple[int, int] | None = None

    def next(self) -> Step:
        """The next step; moves ``place`` on.

        Raises:
            ConfigError: there is nothing to train on.
        """
        refs: list[Ref] = []
        chains = 0
        while chains < self._batch_chains:
            ref = self._next_ref()
            refs.append(ref)
            chains += self._chains(ref)
        return Step(self._split(refs), chains)

    def _next_ref(self) -> Ref:
        place = self.place
        if place.shards == 0 or place.index >= len(self._ordered()):
            place.epoch += 1 if place.shards else 0
            place.index, place.shards = 0, self._cache.refresh()
            if not self._ordered():
                raise ConfigError("conversations: got none with an answer of two tokens or more, expected some")
        ref = self._ordered()[place.index]
        place.index += 1
        return ref

    def _ordered(self) -> Sequence[Ref]:
        key = (self.place.epoch, self.place.shards)
        if self._drawn != key:
            shards = self._cache.shards[: self.place.shards]
            refs = [(s, i) for s, shard in enumerate(shards) for i in range(len(shard))]
            order = np.random.default_rng((self._seed, self.place.epoch)).permutation(len(refs))
            self._order, self._drawn = [refs[i] for i in order], key
        return self._order

    def _split(self, refs: Sequence[Ref]) -> tuple[tuple[Ref, ...], ...]:
        """Micro-batches of about as many chains each; the largest first, so that workers end together."""
        parts: list[list[Ref]] = []
        room = 0
        for ref in sorted(refs, key=self._chains, reverse=True):
            if room <= 0:
                parts.append([])
                room = self._micro_chains
            parts[-1].append(ref)
            room -= self._chains(ref)
        return tuple(tuple(part) for part in parts)

    def _chains(self, ref: Ref) -> int:
        return self._cache.shards[ref[0]].chains(ref[1])
