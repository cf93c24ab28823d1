"""What came of drafts, read off the texts: vLLM tells its drafters no more than these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Drafts, Ints, Offers
from dynaspec.contract.step import DraftView, Ended, SpecPlan, StepOutcome, StepView, Work
from dynaspec.propose.offers import came_true

from .texts import Int32, MatchedBatch, Texts

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
