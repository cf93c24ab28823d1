"""The tokens that two vocabularies have in common, by what they stand for (token-level intersection: Timor et al.,
2502.05202, algorithm 4; vLLM's ``use_heterogeneous_vocab``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Ints

_log = logging.getLogger(__name__)

LEAST_SHARED = 0.1
"""Share of its tokens that a drafter has to have in common with its target to draft those alone."""

Spelling = tuple[bool, bytes]
"""Whether a token is special; what it adds to a text."""


class TextTokenizer(Protocol):
    """Between texts and tokens, without a loss for whole characters."""

    @property
    def beginning(self) -> tuple[int, ...]:
        """Tokens that are put before every text."""
        ...

    def encode_at(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens of a piece of text, special ones where it spells them, and the character at which each begins."""
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def spellings(self) -> Mapping[int, Spelling]:
        """What each token stands for."""
        ...


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """One to one: any distribution over these tokens is one over the target's, too."""

    own: Ints
    """[S] the drafter's ids."""
    target: Ints
    """[S] the target's ids of the same tokens, ascending."""
    own_of: Ints
    """[the target's vocabulary] the drafter's ids; −1 = it does not have that token."""

    @classmethod
    def of(
        cls, own: Mapping[int, Spelling], target: Mapping[int, Spelling], own_size: int, target_size: int
    ) -> SharedVocabulary:
        """
        Args:
            own, target: see ``TextTokenizer.spellings``. Of several tokens that stand for the same, the first counts.
            own_size, target_size: of the models' vocabularies; ids from there on are left out.
        """
        ours = {spelling: token for token, spelling in sorted(own.items(), reverse=True) if token < own_size}
        theirs = {spelling: token for token, spelling in sorted(target.items(), reverse=True) if token < target_size}
        pairs = sorted((token, ours[spelling]) for spelling, token in theirs.items() if spelling in ours)
        columns: Ints = np.array(pairs, np.int64).reshape(-1, 2)
        own_of: Ints = np.full(target_size, -1, np.int64)
        own_of[columns[:, 0]] = columns[:, 1]
        return cls(np.ascontiguousarray(columns[:, 1]), np.ascontiguousarray(columns[:, 0]), own_of)


@dataclass(frozen=True, slots=True)
class Translation:
    """How a drafter with a vocabulary of its own reads the target's tokens, and drafts such."""

    target: TextTokenizer
    own: TextTokenizer
    shared: SharedVocabulary | None
    """It drafts these alone. None = it drafts any tokens of its own, whose text the target's tokenizer encodes
    (string-level exact match: Timor et al., algorithm 3)."""
    own_lookbehind: int
    """Of its own tokens, how many are encoded anew with the text that follows them."""
    target_lookbehind: int
    """The same of the target's tokens, where drafted text is encoded."""

    @classmethod
    def between(
        cls,
        own: TextTokenizer,
        target: TextTokenizer,
        own_size: int,
        target_size: int,
        *,
        names: tuple[str, str],
        any_tokens: bool,
        own_lookbehind: int,
        target_lookbehind: int,
    ) -> Translation:
        """
        Args:
            own_size, target_size: of the models' vocabularies.
            names: of drafter and target, in a sentence.
            any_tokens: whether it drafts others than they share.

        Raises:
            ConfigError: they share too few tokens to draft those alone.
        """
        ours, theirs = own.spellings(), target.spellings()
        shared = SharedVocabulary.of(ours, theirs, own_size, target_size)
        size, common = min(len(ours), own_size), shared.own.size
        found = f"{names[0]} shares {common} of its {size} tokens with {names[1]}, which has {len(theirs)}"
        if common < LEAST_SHARED * size and not any_tokens:
            raise ConfigError(
                f"{found}; expected at least {LEAST_SHARED:.0%}, or use_heterogeneous_vocab 'slem', which has it draft "
                "any of its tokens"
            )
        _log.info("%s", found)
        return cls(target, own, None if any_tokens else shared, own_lookbehind, target_lookbehind)
