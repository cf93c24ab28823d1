"""Drafting in a vocabulary other than the target's: requests' texts in the drafter's tokens, and tokens in common.

When a lane is drafted for, what has become text since then is encoded with some of the tokens before it, as they may
merge. So the drafter's tokens may change where they end, and its KV is right up to the first that did: that is its
watermark, and all there is to know about rejected drafts, steps without drafts and preemption. Its sequences have
lengths of their own, and therefore blocks of their own, out of a pool that is as large as the target's; a request that
finds no room in it is not drafted for.

It drafts the tokens that the two vocabularies have in common, by what they stand for (token-level intersection: Timor
et al., 2502.05202, algorithm 4; vLLM's ``use_heterogeneous_vocab``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints
from dynaspec.kv.blocks import BlockPool, BlockTables

from .router import Part
from .watermark import Watermarks

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


Int32 = npt.NDArray[np.int32]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6
"""Tokens decoded along, as a token's text may depend on what stands before it."""
_JOIN = 4
"""Own tokens before those encoded anew: the first of a piece of text may be others than within it."""
_CHARACTER = 4
"""Tokens that a character may be cut into: its bytes."""


@dataclass(slots=True)
class _Lane:
    """A request's text as far as its target's tokens make whole characters."""

    cache_salt: str = ""
    text: str = ""
    taken: int = 0
    """Target tokens in it."""
    length: int = 0
    """Own tokens that encode it."""
    open: bool = False
    """It has blocks."""
    too_long: bool = False


class OwnTexts:
    """Follows the texts of all lanes."""

    def __init__(
        self,
        translation: Translation,
        lanes: int,
        blocks: int,
        block_size: int,
        max_length: int,
        *,
        caching: bool,
    ) -> None:
        """
        Args:
            blocks: of the drafter's arena.
            max_length: own tokens of a text and a draft; what is longer is not drafted for.
        """
        self.tables = BlockTables(BlockPool(blocks), lanes, max_length, block_size, caching=caching)
        self.drafts_text = translation.shared is None
        self._by = translation
        self._max_length = max_length
        self._tokens = np.zeros((lanes, max_length), np.int32)
        """Own tokens of each text; behind them those of the latest draft."""
        self._starts = np.zeros((lanes, max_length), np.int32)
        """The character of the text where each begins."""
        self._lengths: Ints = np.zeros(lanes, np.int64)
        """Own tokens, those for a part of a character at the end included."""
        self._followed: Ints = np.zeros(lanes, np.int64)
        """Target tokens at that time."""
        self._lanes = [_Lane() for _ in range(lanes)]

    def admit(self, lane: int, cache_salt: str) -> None:
        """A lane begins anew."""
        self.tables.close(lane)
        self._lanes[lane] = _Lane(cache_salt)
        self._lengths[lane] = self._followed[lane] = 0

    def lag(self, batch: DecodeBatch, seen: Ints) -> Ints:
        """[B] committed tokens, but the last, that the drafter has not seen, where what is not encoded yet counts as
        many tokens as it has for the target."""
        lanes = batch.lanes
        behind: Ints = self._lengths[lanes] - 1 - seen + batch.lengths - self._followed[lanes]
        return np.maximum(behind, 0)

    def follow(self, batch: DecodeBatch, wanted: Ints, marks: Watermarks) -> tuple[Part, dict[str, str]]:
        """Reads the texts of those that are to draft ``wanted`` [B] tokens, and moves their watermarks back to what is
        still right.

        Returns:
            The requests in own tokens, with blocks for their drafts; request id → why it cannot draft.
        """
        reasons: dict[str, str] = {}
        for i in np.flatnonzero(wanted).tolist():
            lane, length = int(batch.lanes[i]), int(batch.lengths[i])
            reason = self._follow(lane, batch.tokens[lane, :length], int(wanted[i]), marks)
            if reason is not None:
                reasons[batch.ids[i]] = reason
        return Part(batch.ids, batch.lanes, self._lengths[batch.lanes], self._tokens, self.tables.array), reasons

    def remember(self, lanes: Ints, drafts: Ints, marks: Watermarks) -> None:
        """What lanes [A] have read is offered to others, and what they drafted [A, K] is kept to be compared.

        Args:
            drafts: own tokens, or the target's where these are drafted.
        """
        shared = self._by.shared
        own = drafts if shared is None else np.maximum(shared.own_of[drafts], 0)
        for row, lane in enumerate(lanes.tolist()):
            length = int(self._lengths[lane])
            room = self._tokens[lane, length : length + own.shape[1]]
            room[:] = own[row, : room.size]
            settled = self._settled(self._lanes[lane])
            self.tables.publish(lane, self._tokens[lane], min(settled, int(marks.seen[lane])))

    def to_target(self, batch: DecodeBatch, drafts: Drafts, depth: Ints) -> Drafts:
        """Drafts of own tokens as the target's tokens of their text.

        A target token has the confidence of the own tokens that begin in it, one that has none of them is certain.

        Args:
            depth: [B] most tokens of each.
        """
        tokens = np.zeros((depth.size, int(depth.max(initial=0))), np.int64)
        confidence, lens = np.zeros(tokens.shape, np.float32), np.zeros_like(drafts.lens)
        chances = np.zeros(drafts.tokens.shape, np.float32) if drafts.confidence is None else drafts.confidence
        for i in np.flatnonzero(drafts.lens).tolist():
            lane, n = int(batch.lanes[i]), int(drafts.lens[i])
            text, begins = self._drafted_text(lane, drafts.tokens[i, :n].tolist())
            found, starts = self._as_target(batch.tokens[lane, : batch.lengths[i]], text)
            kept = min(len(found), int(depth[i]))
            lens[i], tokens[i, :kept] = kept, found[:kept]
            owner = np.searchsorted(starts, begins, side="right") - 1
            products = np.ones(len(found), np.float32)
            np.multiply.at(products, np.maximum(owner, 0), chances[i, : len(begins)])
            confidence[i, :kept] = products[:kept]
        return replace(drafts, tokens=tokens, lens=lens, confidence=confidence, signal=None, repeat_bonus=None)

    def _follow(self, lane: int, target: Int32, wanted: int, marks: Watermarks) -> str | None:
        """See ``follow``; the reason, if there is one."""
        state = self._lanes[lane]
        if state.too_long:
            return "drafter_length"
        ingested = marks.ingested(lane)
        self._take_text(state, target)
        keep, new, starts = self._encode(lane, state)
        tail = self._own_parts(target[state.taken :].tolist())
        if tail is None:
            return "between_characters"
        length = keep + len(new) + len(tail)
        if length >= self._max_length or not length:
            state.too_long = length > 0
            return "drafter_length"
        fresh = [*new, *tail]
        known = self._tokens[lane, keep:length].tolist()
        same = keep + next(
            (i for i, pair in enumerate(zip(known, fresh, strict=True)) if pair[0] != pair[1]), len(fresh)
        )
        self._tokens[lane, keep:length] = fresh
        self._starts[lane, keep:length] = [*starts, *(len(state.text) for _ in tail)]
        state.length, self._lengths[lane], self._followed[lane] = keep + len(new), length, len(target)
        marks.rewind(lane, min(ingested, same, length - 1))
        return None if self._reserve(lane, state, min(length + wanted, self._max_length), marks) else "no_blocks"

    def _reserve(self, lane: int, state: _Lane, tokens: int, marks: Watermarks) -> bool:
        """Blocks for so many own tokens; the first time, those that others have left with the same beginning."""
        if state.open:
            return self.tables.try_grow(lane, tokens)
        cached = self.tables.match(self._tokens[lane, : self._settled(state) + 1], state.cache_salt)
        state.open = self.tables.try_open(lane, cached, tokens, state.cache_salt)
        if state.open:
            marks.admit(lane, cached)
        return state.open

    def _settled(self, state: _Lane) -> int:
        """Own tokens that no text to come changes: blocks of these alone are shared."""
        return max(0, state.length - self._by.own_lookbehind - _JOIN)

    def _take_text(self, state: _Lane, target: Int32) -> None:
        """Adds to the text what whole characters the tokens since have brought."""
        beginning = self._by.target.beginning
        if state.taken == 0 and beginning and tuple(target[: len(beginning)].tolist()) == beginning:
            state.taken = len(beginning)
        first = max(0, state.taken - _CONTEXT)
        tokens = target[first:].tolist()
        shown = self._decode(self._by.target, tokens[: state.taken - first]).rstrip(_REPLACEMENT)
        for end in range(len(target), max(state.taken, len(target) - _CHARACTER), -1):
            decoded = self._decode(self._by.target, tokens[: end - first])
            if not decoded.endswith(_REPLACEMENT):
                state.text += decoded[len(shown) :]
                state.taken = end
                return

    def _encode(self, lane: int, state: _Lane) -> tuple[int, Sequence[int], list[int]]:
        """Own tokens of what is new in the text, and of the end of what was there.

        They are encoded with a few more before them, and joined where both ways of cutting have the same border.

        Returns:
            How many own tokens stay; those that follow; where they begin.
        """
        again, first = self._by.own_lookbehind, len(self._by.own.beginning)
        if not state.length:
            tokens, starts = self._by.own.encode_at(state.text)
            return 0, [*self._by.own.beginning, *tokens], [*(0 for _ in range(first)), *starts]
        begin = max(first, self._settled(state))
        at = int(self._starts[lane, begin]) if begin < state.length else 0
        tokens, found = self._by.own.encode_at(state.text[at:])
        starts = [at + start for start in found]
        places: dict[int, int] = {}
        for place, start in enumerate(starts):
            places.setdefault(start, place)
        known = self._starts[lane, begin : max(begin, state.length - again) + 1].tolist()
        for place in range(len(known) - 1, 0, -1):
            border = places.get(known[place]) if known[place] > known[place - 1] else None
            if border is not None:
                return begin + place, tokens[border:], starts[border:]
        return begin, tokens, starts

    def _own_parts(self, parts: list[int]) -> list[int] | None:
        """Own tokens for the target's that make only a part of a character; None if there are none."""
        if not parts:
            return []
        if self._by.shared is None:
            return None
        own: list[int] = self._by.shared.own_of[parts].tolist()
        return own if min(own) >= 0 else None

    def _drafted_text(self, lane: int, drafted: list[int]) -> tuple[str, list[int]]:
        """Whole characters that drafted own tokens add to a lane's text, and where in them each begins."""
        length = int(self._lengths[lane])
        before = self._tokens[lane, max(0, length - _CONTEXT) : length].tolist()
        shown = len(self._decode(self._by.own, before))
        text, begins = "", [0]
        for n in range(1, len(drafted) + 1):
            decoded = self._decode(self._by.own, before + drafted[:n])[shown:]
            if not decoded.endswith(_REPLACEMENT):
                text = decoded
            begins.append(len(text))
        return text, [begin for begin in begins[:-1] if begin < len(text)]

    def _as_target(self, committed: Int32, text: str) -> tuple[Sequence[int], Sequence[int]]:
        """Target tokens of a text that is to follow, and where in it they begin.

        It is encoded with the latest tokens before it. If it is not cut where these end, they would have been others;
        then it is encoded by itself.
        """
        if not text:
            return [], []
        before = self._decode(self._by.target, committed[-self._by.target_lookbehind :].tolist())
        tokens, starts = self._by.target.encode_at(before + text)
        if len(before) in starts:
            place = starts.index(len(before))
            return tokens[place:], [start - len(before) for start in starts[place:]]
        return self._by.target.encode_at(text)

    @staticmethod
    def _decode(tokenizer: TextTokenizer, tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)
