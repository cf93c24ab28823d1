"""What ``AutoregressiveProposer`` needs of a model that drafts token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from dynaspec.contract.proposer import Ints
from dynaspec.contract.step import ProposerTraits
from dynaspec.model.batch import ForwardBatch

from .own_vocabulary import Translation
from .pass_timing import Runner

Chain = Callable[..., tuple[Ints, Ints, Ints]]
"""A whole draft in one call: of (texts, lengths, tables, block_size, read, most, choices), as ``chain.draft_chain``."""
Tree = Callable[..., tuple[Ints, Ints]]
"""Likewise trees: of (tables, block_size, read, most, lengths, requests, known, growth), as ``chain.draft_tree``."""


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
        """A pass over committed tokens → [R, hidden].

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
