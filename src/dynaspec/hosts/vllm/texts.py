"""Which request is which, and what came of its drafts, both read off the requests' texts.

vLLM gives a drafter of others' making rows of tokens in a changing order, and no names. So requests are told by what
they say: a row whose text goes on from one that was there in the step before is the same request. Two requests that say
the same may be taken for each other, which changes nothing: what a drafter knows of a request is a function of its
tokens. Nor does vLLM say what was accepted: it is what has become text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Drafts, Ints, Offers
from dynaspec.contract.step import DraftView, Ended, SpecPlan, StepOutcome, StepView, Work
from dynaspec.propose.router import came_true

Int32 = npt.NDArray[np.int32]

_COMPARED = 256
"""Latest tokens that must be the same."""


@dataclass(frozen=True, slots=True)
class MatchedBatch:
    """The requests that a step has brought tokens, in vLLM's order; without those that still read their prompts."""

    rows: Ints
    """[B] places in vLLM's batch."""
    lanes: Ints
    """[B]"""
    before: Ints
    """[B] tokens of each in the step before; 0 = it is new."""
    lengths: Ints
    """[B] tokens now, the last of which no model has processed yet."""
    brought: Ints
    """[B] tokens that the step has brought; fewer than are new where a step before it has passed unseen."""
    gone: tuple[str, ...]
    """Requests of the step before that are not among them: ended, preempted or not scheduled."""
    vacated: tuple[int, ...]
    """Their lanes, which new requests may have taken."""


class Texts:
    """The texts of all lanes. A request keeps its lane from step to step."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.tokens: Int32 = np.zeros((max_requests, max_tokens + 1), dtype=np.int32)
        """[lanes, max tokens]; columns from a text's length on are undefined."""
        self._lengths: Ints = np.zeros(max_requests, dtype=np.int64)
        """[lanes] 0 = the lane is free."""
        self._lane_of_row: Ints = np.full(max_requests, -1, dtype=np.int64)
        self._names = [""] * max_requests
        self._numbers = count()

    def names(self, lanes: Sequence[int]) -> tuple[str, ...]:
        """Names that no two requests share."""
        return tuple([self._names[lane] for lane in lanes])

    def meet(self, sampled: Sequence[Sequence[int]], lengths: npt.NDArray[np.integer], tokens: Int32) -> MatchedBatch:
        """Recognises the rows of a step.

        Args:
            sampled: for each row of vLLM's batch the tokens that the step has brought; none: it still reads its prompt.
            lengths: [≥ rows] tokens of each row, these included.
            tokens: [≥ rows, max tokens] of each row.
        """
        brought = np.array(list(map(len, sampled)), dtype=np.int64)
        rows = np.flatnonzero(brought)
        now = np.asarray(lengths, dtype=np.int64)[rows]
        lanes = recognise(rows, now, tokens, self.tokens, self._lengths, self._lane_of_row)
        vacated = np.setdiff1d(np.flatnonzero(self._lengths), lanes).tolist()
        gone = self.names(vacated)
        before = np.where(lanes >= 0, self._lengths[lanes], 0)
        self._lengths[vacated] = 0
        new = np.flatnonzero(lanes < 0)
        lanes[new] = np.flatnonzero(self._lengths == 0)[: new.size]
        for lane in lanes[new].tolist():
            self._names[lane] = str(next(self._numbers))
        take_over(rows, now, tokens, self.tokens, lanes, before)
        self._lengths[lanes] = now
        self._lane_of_row[:] = -1
        self._lane_of_row[rows] = lanes
        return MatchedBatch(rows, lanes, before, now, brought[rows], gone, tuple(vacated))


@kernel
def recognise(rows: Ints, lengths: Ints, tokens: Int32, texts: Int32, known: Ints, lane_of_row: Ints) -> Ints:
    """[B] the lane whose text each row goes on from; −1 = none, it is new.

    Args:
        rows, lengths: [B] places in ``tokens``, and how many tokens each has.
        texts, known: of all lanes, [lanes, max tokens] and [lanes]; a length of 0 = free.
        lane_of_row: [rows] in the step before.
    """
    lanes = np.full(rows.size, -1, np.int64)
    taken = known == 0
    for moved in (False, True):  # most rows stay where they were; who did not may have any lane that is left
        for i in range(rows.size):
            if lanes[i] >= 0:
                continue
            stayed = lane_of_row[rows[i]]
            first, end = (0, known.size) if moved else (max(stayed, 0), stayed + 1)
            for lane in range(first, end):
                if not taken[lane] and _goes_on(texts[lane], known[lane], tokens[rows[i]], lengths[i]):
                    lanes[i], taken[lane] = lane, True
                    break
    return lanes


@kernel
def _goes_on(text: Int32, length: int, other: Int32, other_length: int) -> bool:
    """Whether ``other`` is ``text`` with at least one token more, as far as its latest tokens tell."""
    same, first = other_length > length, max(0, length - _COMPARED)
    i = length - 1
    while same and i >= first:
        same = text[i] == other[i]
        i -= 1
    return same


@kernel
def take_over(rows: Ints, lengths: Ints, tokens: Int32, texts: Int32, lanes: Ints, before: Ints) -> None:
    """Copies what is new: tokens from ``before`` on."""
    for i in range(rows.size):
        for j in range(before[i], lengths[i]):
            texts[lanes[i], j] = tokens[rows[i], j]


T = TypeVar("T")


@dataclass(slots=True)
class PendingStep:
    """What was drafted, until the next step has verified it."""

    view: StepView
    lanes: Ints
    granted: SpecPlan
    plan: SpecPlan
    """After the trim."""
    drafts: Drafts
    drafted: DraftView
    offers: tuple[Offers | None, ...]
    """What each proposer was found to offer."""
    began_s: float
    """When drafting began, which is when the step before ended."""
    ended_s: float


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Of the requests that were drafted for, or planned, in the step before, those that are still there [N]."""

    places: Ints
    """In the step before."""
    met: Ints
    """In the step that has ended."""
    before: Ints
    """Tokens of each before the step."""
    accepted: Ints
    """Drafted tokens that have become text."""
    emitted: Ints
    rejected: npt.NDArray[np.bool_]
    """The text has another token than the draft behind the accepted ones. If not, and there was one, vLLM has not
    verified it: its scheduler may cut drafts."""


def draft_result(met: MatchedBatch, texts: Int32, lanes: Ints, drafts: Ints, depth: Sequence[int]) -> DraftResult:
    """
    Args:
        texts: [lanes, max tokens] of all lanes, as they are now.
        lanes: [P] of the step before.
        drafts, depth: [P, max depth] tokens, and how many of them were handed over [P].
    """
    handed = np.array(depth, dtype=np.int64)
    return DraftResult(*compared(met.lanes, met.before, met.lengths, met.brought, texts, lanes, drafts, handed))


@kernel
def compared(
    lanes: Ints,
    before: Ints,
    lengths: Ints,
    brought: Ints,
    texts: Int32,
    drafted: Ints,
    drafts: Ints,
    depth: Ints,
) -> tuple[Ints, Ints, Ints, Ints, Ints, npt.NDArray[np.bool_]]:
    """The fields of ``DraftResult``.

    Args:
        lanes, before, lengths, brought: [B] of the step that has ended, see ``MatchedBatch``.
        drafted, drafts, depth: lanes of the step before, and the rest as in ``draft_result``.
    """
    place_of = np.full(texts.shape[0], -1, np.int64)
    for p in range(drafted.size):
        place_of[drafted[p]] = p
    places, at, known = np.empty(lanes.size, np.int64), np.empty(lanes.size, np.int64), np.empty(lanes.size, np.int64)
    accepted, emitted = np.empty(lanes.size, np.int64), np.empty(lanes.size, np.int64)
    rejected = np.zeros(lanes.size, np.bool_)
    found = 0
    for i in range(lanes.size):
        p = place_of[lanes[i]]
        if p < 0 or before[i] == 0 or lengths[i] - before[i] != brought[i]:
            continue
        text, same = texts[lanes[i], before[i] : lengths[i]], 0
        while same < min(depth[p], brought[i] - 1) and text[same] == drafts[p, same]:
            same += 1
        places[found], at[found], known[found], accepted[found], emitted[found] = p, i, before[i], same, brought[i]
        rejected[found] = same < depth[p] and text[same] != drafts[p, same]
        found += 1
    return places[:found], at[:found], known[:found], accepted[:found], emitted[:found], rejected[:found]


def load_compiled() -> None:
    """Loads what is compiled for telling texts apart and comparing them, or the first step would."""
    lane, text = np.zeros(1, dtype=np.int64), np.zeros((1, 4), dtype=np.int32)
    texts = Texts(1, 3)
    met = texts.meet([[0]], lane + 2, text)
    draft_result(met, texts.tokens, lane, text.astype(np.int64), (0,))


def build_outcome(
    opened: PendingStep, came: DraftResult, texts: Int32, pass_rows: int | None, ended_s: float, *, prefill: bool
) -> StepOutcome:
    """
    Args:
        texts: as in ``draft_result``.
        pass_rows: of the target's pass; None = not known: as many as are known of.
        ended_s: when the step ended, by the clock that ``opened`` was timed by.
        prefill: prompts were read in it.
    """
    places = came.places.tolist()
    handed, accepted, rejected = _of(opened.plan.depth, places), came.accepted.tolist(), came.rejected.tolist()
    verify, kv_tokens = _verified(came.before.tolist(), handed)
    rows = verify if pass_rows is None else pass_rows
    verify = min(verify, rows) if prefill else rows
    read = rows - verify
    early = opened.drafts.early_exit
    offers = tuple([None if one is None else one.select(places) for one in opened.offers])
    return StepOutcome(
        plan_step=opened.view.step,
        ids=_of(opened.view.ids, places),
        proposer=_of(opened.plan.proposer, places),
        requested=_of(opened.granted.depth, places),
        drafted=_of(opened.drafted.length, places),
        verified=tuple([k if r or a == k else a for k, a, r in zip(handed, accepted, rejected, strict=True)]),
        accepted=tuple(accepted),
        emitted=tuple(came.emitted.tolist()),
        ended=tuple(map(_ended, handed, rejected)),
        early_exit=(False,) * len(places) if early is None else tuple(early[places].tolist()),
        confidence=_of(opened.drafted.confidence, places),
        work=Work(
            rows_per_pass=opened.drafts.rows_per_pass,
            verify_rows=verify,
            kv_tokens=kv_tokens + read * (read + 1) // 2,
            prefill_rows=read,
            kv_skipped=opened.drafts.kv_skipped,
            kv_redone=opened.drafts.kv_redone,
        ),
        draft_s=opened.ended_s - opened.began_s,
        verify_s=ended_s - opened.ended_s,
        step_s=ended_s - opened.began_s,
        signal=_of(opened.drafted.signal, places) if opened.drafted.signal else (),
        came_true=came_true(offers, texts, opened.lanes[came.places], came.before, came.before + came.emitted),
    )


def _verified(lengths: Sequence[int], handed: Sequence[int]) -> tuple[int, int]:
    """Rows that verify, and the KV entries they see: each sees its request's text up to itself."""
    rows = sum(handed) + len(handed)
    return rows, sum([(1 + k) * length + k * (k + 1) // 2 for length, k in zip(lengths, handed, strict=True)])


def _ended(handed: int, rejected: bool) -> Ended:
    if not handed:
        return "none"
    return "rejected" if rejected else "all_accepted"


def _of(column: Sequence[T], places: Sequence[int]) -> tuple[T, ...]:
    return tuple([column[i] for i in places])
