"""A small model of the target's vocabulary drafts (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""

from __future__ import annotations

from functools import partial

import torch

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import Ints
from dynaspec.kv.arena import Arena
from dynaspec.model.base import Model
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.compiled import CacheAddresses

from .calibrate import Runner
from .drafter import Chain
from .first_choice import Choices
from .warm_up import load_chain


class DraftModel:
    """See ``Drafter``."""

    traits = METHODS["draft_model"].traits
    taps: tuple[int, ...] = ()
    unread = 0
    reads_again = False
    vocabulary: Ints | None = None

    def __init__(self, model: Model, arena: Arena) -> None:
        self._model = model
        self._arena = arena
        self._caches = CacheAddresses()
        self.vocab_size = model.config.vocab_size
        self.max_position = model.config.max_position
        self.device = model.device
        self.runner = Runner(model, arena)
        self.chain: Chain | None = None if model.compiled is None else partial(self._draft, load_chain())

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def _draft(
        self, chain: Chain, tables: Ints, block_size: int, read: Ints, most: int, choices: Choices
    ) -> tuple[Ints, Ints, Ints]:
        layers = self._arena.layers
        caches = self._caches.of(layers)
        return chain(self._model.compiled, caches, len(layers[0][0]), tables, block_size, read, most, choices)
