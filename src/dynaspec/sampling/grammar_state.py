"""Where each running request stands in its grammar, where drafted tokens would lead it, and what may follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask

from .grammar import Bits, DeadEnd, Grammar, fault_of
from .ops import Rows
from .rng import Int64


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow some output."""

    bits: Bits
    """[⌈vocabulary / 32⌉] bit i % 32 of word i // 32 is set if token i may follow."""
    complete: bool = False
    """The output may end here."""
    fault: str = ""
    """Why the grammar cannot be followed further; no bit is set then."""

    def has(self, token: int) -> bool:
        return bool(self.bits[token >> 5] >> (token & 31) & 1)


class GrammarState:
    """Follows one request's output. Drafted tokens are followed on trial, and taken back.

    What is allowed is a function of the output and the drafted tokens alone. Behind a token that is refused, and behind
    one that ends the output, everything is: no token is ever drawn there.
    """

    def __init__(self, grammar: Grammar, ends: Sequence[int], min_tokens: int) -> None:
        """
        Args:
            ends: tokens that end the output; they may come wherever it may end.
            min_tokens: none of them comes before this many tokens, as long as anything else may.
        """
        self._grammar = grammar
        self._ends = frozenset(ends)
        self._min_tokens = min_tokens
        self._end_bits = _bits_of(grammar, self._ends)
        self._other_bits = ~self._end_bits
        foreign = {*grammar.eos_tokens} - self._ends
        self._foreign_bits = _bits_of(grammar, foreign) if foreign else None
        """Ends that the request has not."""
        self._anything = Allowed(~_bits_of(grammar, ()))
        self._matcher: LLMatcher | None = grammar.matcher()
        """Has consumed the output and the path; None if it is no longer good for anything."""
        self._output: list[int] = []
        self._path: list[int] = []
        """Drafted tokens."""
        self._known: list[Allowed] = []
        """What may follow the output and the first 0, 1, … tokens of the path, as far as it was asked for."""
        self._renewed = False

    def commit(self, tokens: Sequence[int]) -> None:
        """These became output."""
        shared = _shared(self._path, tokens)
        self._go_back(shared)
        if self._matcher is not None and self._matcher.try_consume_tokens(list(tokens[shared:])) < len(tokens) - shared:
            self._matcher = None
        self._output += tokens
        self._path.clear()
        self._known = self._known[shared : shared + 1] if shared == len(tokens) else []

    def allowed(self, drafted: Sequence[int]) -> Allowed:
        """What may follow the output and the ``drafted`` tokens."""
        shared = _shared(self._path, drafted)
        if shared < len(drafted):
            self._go_back(shared)
            for token in drafted[shared:]:
                if token in self._ends or not self._at(len(self._path)).has(token):
                    return self._anything
                if self._matcher is not None and self._matcher.try_consume_tokens([token]) < 1:
                    self._matcher = None
                self._path.append(token)
        return self._at(len(drafted))

    def refuses(self, drafted: Sequence[int], token: int) -> bool:
        """Whether ``token`` may not follow the output and the ``drafted`` tokens."""
        return not self.allowed(drafted).has(token)

    def testable(self, drafted: Sequence[int]) -> int:
        """How many of the ``drafted`` tokens can be told from their tests: those up to the first that is refused."""
        for depth, token in enumerate(drafted):
            if self.refuses(drafted[:depth], token):
                return depth + 1
        return len(drafted)

    def _at(self, depth: int) -> Allowed:
        """What may follow the output and ``depth`` tokens of the path; only the last is not known yet."""
        if depth == len(self._known):
            self._known.append(self._ask())
        return self._known[depth]

    def _ask(self) -> Allowed:
        """What may follow the output and the whole path."""
        matcher = self._catch_up(self._grammar.matcher()) if self._matcher is None else self._matcher
        bits = np.empty(self._grammar.words, np.int32)
        fill_next_token_bitmask(matcher, bits[None])
        if matcher.is_error() and not self._renewed:  # perhaps because of what others' matchers have learned
            self._renewed = True
            matcher = self._catch_up(self._grammar.renew())
            fill_next_token_bitmask(matcher, bits[None])
        if matcher.is_error():
            self._matcher = None
            return Allowed(_bits_of(self._grammar, ()), fault=fault_of(matcher))
        self._matcher = matcher
        if matcher.is_stopped():
            bits[:] = 0
        complete = matcher.is_accepting()
        if self._foreign_bits is not None:
            bits &= ~self._foreign_bits
        if complete:
            bits |= self._end_bits
        if len(self._output) + len(self._path) < self._min_tokens and (bits & self._other_bits).any():
            bits &= self._other_bits
        return Allowed(bits, complete)

    def _go_back(self, depth: int) -> None:
        """Leaves ``depth`` tokens of the path."""
        surplus = len(self._path) - depth
        if not surplus:
            return
        if self._matcher is not None and not self._matcher.rollback(surplus):  # some grammars cannot go back
            self._matcher = None
        del self._path[depth:], self._known[depth + 1 :]

    def _catch_up(self, matcher: LLMatcher) -> LLMatcher:
        """A new matcher, brought to where the output and the path end; in error if the grammar does not lead there."""
        matcher.consume_tokens(self._output + self._path)
        return matcher


def _shared(path: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shared = 0
    for ours, theirs in zip(path, tokens, strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared


def _bits_of(grammar: Grammar, tokens: Iterable[int]) -> Bits:
    bits = np.zeros(grammar.words, np.int32)
    for token in tokens:
        bits.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
    return bits


class LaneGrammars:
    """What the grammars of running requests say of rows and drafts, by lane. Requests without one are passed over."""

    def __init__(self) -> None:
        self._states: dict[int, GrammarState] = {}

    def add(self, lane: int, state: GrammarState) -> None:
        """A request with a grammar takes a lane."""
        self._states[lane] = state

    def remove(self, lane: int) -> None:
        """The lane's request is gone."""
        self._states.pop(lane, None)

    def commit(self, lane: int, tokens: Sequence[int]) -> None:
        """These tokens became output."""
        if lane in self._states:
            self._states[lane].commit(tokens)

    def bits(self, rows: Rows, index: Int64) -> Bits:
        """[r, W] masks of the rows ``index`` [r], which all have a grammar: see ``Allowed``."""
        lanes = rows.lanes[index].tolist()
        allowed = [self._states[lane].allowed(rows.drafted(row)) for row, lane in zip(index, lanes, strict=True)]
        return np.stack([one.bits for one in allowed])

    def testable(self, lanes: Int64, drafts: Int64, lens: Int64) -> Int64:
        """[B] the lengths ``lens`` of drafts [B, K], without what lies behind a first token that is refused.

        Whether a token is tested still depends on those before it alone, so that acceptance stays exact.
        """
        if not self._states:
            return lens
        lens = lens.copy()
        for i, lane in enumerate(lanes.tolist()):
            if lane in self._states and lens[i] > 1:
                lens[i] = self._states[lane].testable(drafts[i, : lens[i]].tolist())
        return lens

    def refused(self, rows: Rows, index: Int64, tokens: Int64) -> npt.NDArray[np.bool_]:
        """[r] whether a grammar refuses ``tokens`` [r] in the rows ``index`` [r]."""
        refused = np.zeros(index.size, np.bool_)
        if self._states:
            for i, (row, lane) in enumerate(zip(index, rows.lanes[index].tolist(), strict=True)):
                if lane in self._states:
                    refused[i] = self._states[lane].refuses(rows.drafted(row), int(tokens[i]))
        return refused

    def dead_end(self, lane: int, drafted: Sequence[int]) -> DeadEnd:
        """What it means that no token may follow a request's output and the ``drafted`` tokens."""
        if lane not in self._states:
            return DeadEnd("error", "allowed_token_ids and bad_words leave no token; expected at least one everywhere")
        allowed = self._states[lane].allowed(drafted)
        if allowed.complete:
            return DeadEnd("stop", None)
        if allowed.fault:
            return DeadEnd("error", f"structured_outputs could not be followed any further: {allowed.fault}")
        return DeadEnd(
            "error", "structured_outputs and the request's other rules leave no token; expected at least one"
        )
