"""A small model of the target's vocabulary drafts (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
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
from .warm_up import nobody


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
        self.chain: Chain | None = None
        if model.compiled is not None:
            self.chain = self._draft
            self.chain(*nobody())  # or the first draft would take seconds

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    def _draft(
        self, tables: npt.NDArray[np.int32], block_size: int, read: Ints, most: int, choices: Choices
    ) -> tuple[Ints, Ints, Ints]:
        layers = self._arena.layers
        caches = self._caches.of(layers)
        return _chain()(self._model.compiled, caches, len(layers[0][0]), tables, block_size, read, most, choices)


@cache
def _chain() -> Chain:
    """``chain.draft_chain``. It is imported only where a model drafts on CPU: it compiles what it calls."""
    from .chain import draft_chain

    chain: Chain = draft_chain
    return chain
