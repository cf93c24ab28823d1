"""A small model of the target's vocabulary drafts (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""

from __future__ import annotations

import torch

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import Ints
from dynaspec.kv.arena import Arena
from dynaspec.model.base import Model
from dynaspec.model.batch import ForwardBatch

from .calibrate import Runner
from .drafter import Chain, Tree


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
        self.vocab_size = model.config.vocab_size
        self.max_position = model.config.max_position
        self.device = model.device
        self.runner = Runner(model, arena)
        self.chain: Chain | None = None
        self.tree: Tree | None = None
        if model.compiled is not None:
            from .chain import chain_of, tree_of  # they compile what they call

            self.chain, self.tree = chain_of(model.compiled, arena), tree_of(model.compiled, arena)

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)
