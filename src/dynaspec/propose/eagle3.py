"""An EAGLE-3 head drafts from the target's hidden states (Li et al., 2503.01840).

Committed tokens are read with the target's states, drafted ones with the head's own. So accepted drafts are read again,
in the first pass of the next draft, beside the token that followed them.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import Ints
from dynaspec.kv.arena import Arena
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.compiled import CacheAddresses
from dynaspec.model.eagle3.head import Eagle3Head, TimedHead
from dynaspec.model.taps import Taps

from .calibrate import Runner
from .drafter import Chain
from .first_choice import Choices
from .warm_up import nobody


class Eagle3Drafter:
    """See ``Drafter``."""

    traits = METHODS["eagle3"].traits
    unread = 1
    reads_again = True

    def __init__(self, head: Eagle3Head, arena: Arena, taps: Taps) -> None:
        """
        Args:
            taps: where the target keeps the states that the head reads, and no others.
        """
        self._head = head
        self._arena = arena
        self._states = taps.arena
        self._caches = CacheAddresses()
        self.taps = taps.states
        self.vocab_size = head.config.vocab_size
        self.vocabulary = head.vocabulary
        self.max_position = head.config.max_position
        self.device = head.device
        self.runner = Runner(TimedHead(head), arena)
        self.chain: Chain | None = None
        if head.compiled is not None:
            self.chain = self._draft
            self.chain(*nobody())  # or the first draft would take seconds

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        states = self._states[torch.from_numpy(before).to(self.device)]
        return self._head.forward(rows, self._head.fuse(states), self._arena.layers)

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.forward(rows, hidden, self._arena.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden)

    def _draft(
        self, tables: npt.NDArray[np.int32], block_size: int, read: Ints, most: int, choices: Choices
    ) -> tuple[Ints, Ints, Ints]:
        layers = self._arena.layers
        caches, states = self._caches.of(layers), self._states.numpy()
        return _chain()(self._head.compiled, states, caches, len(layers[0][0]), tables, block_size, read, most, choices)


@cache
def _chain() -> Chain:
    """``eagle3_chain.draft_chain``. It is imported only where a head drafts on CPU: it compiles what it calls."""
    from .eagle3_chain import draft_chain

    chain: Chain = draft_chain
    return chain
