"""A head drafts from the target's hidden states (EAGLE, Li et al., 2401.15077; MTP, Gloeckle et al., 2404.19737).

Committed tokens are read with the target's states, drafted ones with the head's own. So accepted drafts are read again,
in the first pass of the next draft, beside the token that followed them.
"""

from __future__ import annotations

import torch

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import Ints
from dynaspec.kv.arena import Arena
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.decoder_heads.head import Head, TimedHead
from dynaspec.model.taps import Taps

from .calibrate import Runner
from .drafter import Chain, Tree
from .shared_vocabulary import Translation


class DecoderHeadDrafter:
    """See ``Drafter``."""

    unread = 1
    reads_again = True
    targets_kv = False
    translation: Translation | None = None

    def __init__(self, head: Head, arena: Arena, taps: Taps, method: str) -> None:
        """
        Args:
            taps: where the target keeps the states that the head reads, and no others.
            method: that the head is for.
        """
        self.traits = METHODS[method].traits
        self._head = head
        self._arena = arena
        self._states = taps.arena
        self.taps = taps.states
        self.vocab_size = head.config.vocab_size
        self.vocabulary = head.vocabulary
        self.max_position = head.config.max_position
        self.device = head.device
        self.runner = Runner(TimedHead(head), arena)
        self.chain: Chain | None = None
        self.tree: Tree | None = None
        if head.compiled is not None:
            from .chain import chain_of, tree_of  # they compile what they call

            parts = head.compiled.decoder, arena, head.compiled, taps.arena.numpy()
            self.chain, self.tree = chain_of(*parts), tree_of(*parts)

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        states = self._states[torch.from_numpy(before).to(self.device)]
        return self._head.forward(rows, self._head.fuse(states), self._arena.layers)

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.forward(rows, hidden, self._arena.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden)
