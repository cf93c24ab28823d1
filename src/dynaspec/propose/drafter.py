"""Models that draft token by token, and what ``AutoregressiveProposer`` needs of one.

A draft model is a small one (Leviathan et al., 2211.17192; Chen et al., 2302.01318), or the target's own first layers
(LayerSkip: Elhoushi et al., 2404.16710).

A head drafts from the target's hidden states (EAGLE, Li et al., 2401.15077; MTP, Gloeckle et al., 2404.19737).
Committed tokens are read with the target's states, drafted ones with the head's own. So accepted drafts are read again,
in the first pass of the next draft, beside the token that followed them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import Ints
from dynaspec.contract.step import ProposerTraits
from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.model.decoder_heads.head import Head, TimedHead
from dynaspec.model.taps import Taps

from .own_vocabulary import Translation
from .pass_timing import Runner

if TYPE_CHECKING:
    from .chain import Chain, Tree


class Drafter(Protocol):
    """Runs passes on KV of its own, or on the target's. What a pass returns for a row, [hidden], gives the next token's
    logits, and goes into the pass over that token."""

    traits: ProposerTraits
    taps: tuple[int, ...]
    """Hidden states of the target that it reads, see ``model.taps``."""
    unread: int
    """Tokens at the beginning of every text that it never reads."""
    reads_again: bool
    """It reads accepted drafts again, since the target knows more about them than it did."""
    targets_kv: bool
    """Its KV is the target's, which is there for every committed token but the last. What it writes for that one and
    for drafted ones, the target's pass writes over."""
    translation: Translation | None
    """It reads tokens of its own; None = the target's."""
    vocab_size: int
    """Of what it drafts: the target's, or of its own tokens where those are drafted."""
    vocabulary: Ints | None
    """[V] the target's ids of the tokens that its logits are about; None = all, in their order."""
    max_position: int
    device: torch.device
    chain: Chain | None
    """None where passes have to be run from Python."""
    tree: Tree | None
    """Likewise."""
    runner: Runner
    """For timing its passes."""

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        """A pass over committed tokens → [R, hidden] without ``rows.kv_only``.

        Args:
            before: [R] KV slots of the tokens before each.
        """
        ...

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """A pass over drafted tokens, after each of which a pass was left with ``hidden`` [R, hidden].

        Args:
            rows: of tokens as they were drafted, whatever it reads.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[r, hidden] → [r, V] float32."""
        ...


class DraftModel:
    """See ``Drafter``."""

    taps: tuple[int, ...] = ()
    unread = 0
    reads_again = False

    def __init__(
        self,
        model: Model,
        arena: Arena,
        *,
        traits: ProposerTraits = METHODS["draft_model"].traits,
        targets_kv: bool = False,
        translation: Translation | None = None,
    ) -> None:
        """
        Args:
            targets_kv: see ``Drafter``; the arena is the target's, or the part of it that the model has layers for.
            translation: see ``Drafter``.
        """
        self.traits = replace(traits, trees=traits.trees and translation is None)
        self.targets_kv = targets_kv
        self.translation = translation
        shared = None if translation is None else translation.shared
        self.vocabulary: Ints | None = None if shared is None else shared.target
        self._columns: torch.Tensor | None = None
        self._own_of: torch.Tensor | None = None
        if shared is not None:
            self._columns = torch.from_numpy(shared.own).to(model.device)
            # Where nothing shared is allowed, any token may have been drafted: it is read as another.
            self._own_of = torch.from_numpy(np.maximum(shared.own_of, 0)).to(model.device)
        self._model = model
        self._arena = arena
        self.vocab_size = model.config.vocab_size if shared is None else shared.own_of.size
        self.max_position = model.config.max_position
        self.device = model.device
        self.runner = Runner(model, arena)
        self.chain: Chain | None = None
        self.tree: Tree | None = None
        if model.compiled is not None:
            from .chain import chain_of, tree_of

            self.chain = chain_of(model.compiled, arena, shared=shared)
            self.tree = tree_of(model.compiled, arena) if self.traits.trees else None

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        return self._model.forward(rows, self._arena.layers)

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        if self._own_of is not None:
            rows = replace(rows, tokens=self._own_of[rows.tokens])
        return self._model.forward(rows, self._arena.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._model.logits(hidden)
        return logits if self._columns is None else logits[:, self._columns]


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
            from .chain import chain_of, tree_of

            parts = head.compiled.decoder, arena, head.compiled, taps.arena.numpy()
            self.chain, self.tree = chain_of(*parts), tree_of(*parts)

    def read(self, rows: ForwardBatch, before: Ints) -> torch.Tensor:
        states = self._states[torch.from_numpy(before).to(self.device)]
        return self._head.forward(rows, self._head.fuse(states), self._arena.layers)

    def extend(self, rows: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.forward(rows, hidden, self._arena.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden)
