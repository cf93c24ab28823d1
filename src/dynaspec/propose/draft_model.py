"""A model drafts: a small one (Leviathan et al., 2211.17192; Chen et al., 2302.01318), or the target's own first layers
(LayerSkip: Elhoushi et al., 2404.16710)."""

from __future__ import annotations

import torch

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import Ints
from dynaspec.contract.step import ProposerTraits
from dynaspec.kv.arena import Arena
from dynaspec.model.base import Model
from dynaspec.model.batch import ForwardBatch

from .calibrate import Runner
from .drafter import Chain


class DraftModel:
    """See ``Drafter``."""

    taps: tuple[int, ...] = ()
    unread = 0
    reads_again = False
    vocabulary: Ints | None = None

    def __init__(
        self,
        model: Model,
        arena: Arena,
        *,
        traits: ProposerTraits = METHODS["draft_model"].traits,
        targets_kv: bool = False,
    ) -> None:
        """
        Args:
            targets_kv: see ``Drafter``; the arena is the target's, or the part of it that the model has layers for.
        """
        self.traits = traits
        self.targets_kv = targets_kv
        self._model = model
        self._arena = arena
        self.vocab_size = model.config.vocab_size
        self.max_position = model.config.max_position
        self.device = model.device
        self.runner = Runner(model, arena)
        self.chain: Chain | None = None
        if model.compiled is not None:
            from .chain import chain_of  # it compiles what it calls

            self.chain = chain_of(model.compiled, arena)

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)
