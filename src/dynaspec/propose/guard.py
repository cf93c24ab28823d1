"""Faults of proposers cost no request: drafts are checked, and a proposer that fails or is slow is left out.

A fault that can be laid at a request's door (nonsense in its row) switches speculation off for that request; one that
cannot (an exception) for all that were to draft. After ``max_faults`` the proposer is switched off for good; good
drafts between make them forgotten.

A draft also has a budget: the time that the target would take to decode, for all requests side by side, what the
drafter reads and what it may bring. Drafting that takes longer cannot pay, whatever is accepted. It is late when it
takes three times its budget, and if most of the latest drafts were, that is a fault that switches the proposer off: one
alone may be the machine's doing, and its tokens are as good as any. A call that never returns cannot be ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import kernel
from dynaspec.contract.errors import ProposerFault
from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints, NewText, Offers, Proposer, ProposerNeeds, TargetStep
from dynaspec.contract.step import ProposerTraits, SpecPlan

_PASSES = 31
_LEAST_PASSES = 8
_DRAFTS = 15
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
_NO_SIGNAL: Floats = np.zeros((0, 0), np.float32)
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
Fault = Literal["raised", "nonsense", "overrun"]
_FAULTS_FORGOTTEN_AFTER = 1000
"""Good drafts in a row."""
_LATE = 3.0
"""Budgets."""
_LEAST_BUDGET_S = 0.05
"""Page faults and a busy machine must not look like a slow drafter where passes take milliseconds."""
_FIRST_DRAFTS = 3
"""Drafts that are not timed: they load compiled code."""


def no_drafts(requests: int) -> Drafts:
    """Drafts of length 0 for every request."""
    return Drafts(
        tokens=np.zeros((requests, 0), dtype=np.int64),
        lens=np.zeros(requests, dtype=np.int64),
        early_exit=np.zeros(requests, dtype=np.bool_),
    )


class Stateless:
    """What a proposer does that keeps nothing of requests, and looks nothing up."""

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return (0,) * len(batch.ids)

    def peek(self, batch: DecodeBatch) -> Offers | None:
        return None

    def advance(self, step: TargetStep) -> None:
        """Nothing to keep."""

    def commit(self, text: NewText) -> None:
        """Nothing to keep."""

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        """Nothing to keep."""

    def evict(self, lane: int) -> None:
        """Nothing to keep."""


class NoProposer(Stateless):
    """The proposer of plain decoding."""

    traits = ProposerTraits(name="none", passes_per_draft="none", has_confidence=False)
    needs = ProposerNeeds()

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        return no_drafts(len(batch.ids))


class TargetPassTimer:
    """Seconds of a target pass over decoding requests: the running median of the latest ones.

    Where drafts are verified in every pass, it is a little more than a plain pass takes, which errs towards patience.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_PASSES)

    def record(self, seconds: float) -> None:
        """A pass without prefill rows has been run."""
        self._latest.append(seconds)

    @property
    def seconds(self) -> float | None:
        """None until a few passes are known; the first ones load compiled code and are no measure."""
        return median(self._latest) if len(self._latest) >= _LEAST_PASSES else None


class TimeoutDetector:
    """Whether drafts are late as a rule. Single ones are where the machine is busy, or compiles what is used first."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=_DRAFTS)

    def add(self, late: bool) -> bool:
        """Counts a draft; returns whether most of the latest have been late."""
        self._latest.append(late)
        return late and 2 * sum(self._latest) > _DRAFTS


class FaultCounter:
    """Faults that add up, unless there are good drafts enough between them: those of hours ago do not count."""

    def __init__(self, most: int, forgotten_after: int) -> None:
        """
        Args:
            most: faults that make one too many.
            forgotten_after: good drafts in a row, after which all faults are forgotten.
        """
        self._most = most
        self._forgotten_after = forgotten_after
        self._faults = 0
        self._good = 0

    def good(self) -> None:
        """A draft was as it should be."""
        self._good += 1
        if self._good >= self._forgotten_after:
            self._faults = 0

    def fault(self) -> bool:
        """Counts one more; returns whether that is one too many."""
        self._good = 0
        self._faults += 1
        return self._faults >= self._most


def nonsense(drafts: Drafts, plan: SpecPlan, vocab_size: int) -> Bools:
    """[B] which rows cannot be verified.

    Args:
        plan: what was asked for.

    Raises:
        ProposerFault: the answer as a whole has the wrong form.
    """
    depth, nodes = np.array(plan.depth, dtype=np.int64), np.array(plan.nodes, dtype=np.int64)
    _check_form(drafts, nodes if drafts.parents is not None else depth, vocab_size)
    tokens, lens = np.ascontiguousarray(drafts.tokens, np.int64), np.ascontiguousarray(drafts.lens, np.int64)
    signals = map(_signal, (drafts.confidence, drafts.signal, drafts.repeat_bonus))
    bad = unusable(tokens, lens, depth if drafts.parents is None else nodes, vocab_size, *signals)
    if drafts.parents is not None:
        bad |= misgrown(np.ascontiguousarray(drafts.parents, np.int64), np.where(bad, 0, lens), depth)
    if drafts.q is not None:
        request, slot = np.nonzero(np.arange(tokens.shape[1]) < np.where(bad, 0, lens)[:, None])
        drawn = drafts.q[request, slot, tokens[request, slot]]
        bad[request[~torch.isfinite(drawn).cpu().numpy()]] = True
    return bad


def _signal(column: Floats | None) -> Floats:
    return _NO_SIGNAL if column is None else np.ascontiguousarray(column, np.float32)


@kernel
def unusable(
    tokens: Ints,
    lens: Ints,
    depth: Ints,
    vocab_size: int,
    confidence: Floats,
    signal: Floats,
    repeat_bonus: Floats,
) -> Bools:
    """[B] drafts of another length than 0 … ``depth`` [B], or with a token or a signal that cannot be.

    Args:
        tokens: [B, K], of which ``lens`` [B] were drafted.
        confidence, signal, repeat_bonus: [B, K], or empty.
    """
    bad = (lens < 0) | (lens > depth)
    for r in range(lens.size):
        for j in range(min(lens[r], tokens.shape[1])):
            bad[r] |= tokens[r, j] < 0 or tokens[r, j] >= vocab_size
            bad[r] |= confidence.size > 0 and not np.isfinite(confidence[r, j])
            bad[r] |= signal.size > 0 and not np.isfinite(signal[r, j])
            bad[r] |= repeat_bonus.size > 0 and not np.isfinite(repeat_bonus[r, j])
    return bad


@kernel
def misgrown(parents: Ints, lens: Ints, depth: Ints) -> Bools:
    """[B] trees of ``lens`` [B] nodes with a parent that does not come before its child, or deeper than ``depth`` [B].

    Args:
        parents: [B, N]
    """
    bad, own = np.zeros(lens.size, np.bool_), np.zeros(parents.shape[1], np.int64)
    for r in range(lens.size):
        for j in range(lens[r]):
            above = parents[r, j]
            if above < -1 or above >= j:
                bad[r] = True
                break
            own[j] = 1 if above < 0 else own[above] + 1
            bad[r] |= own[j] > depth[r]
    return bad


def _check_form(drafts: Drafts, depth: npt.NDArray[np.int64], vocab_size: int) -> None:
    """
    Raises:
        ProposerFault: a column of another shape than the others, or of numbers that are not integers.
    """
    requests, width = len(depth), int(depth.max(initial=0))
    if drafts.tokens.ndim != 2 or drafts.tokens.shape[0] != requests or drafts.lens.shape != (requests,):
        raise ProposerFault(
            f"drafts have tokens {drafts.tokens.shape} and lens {drafts.lens.shape}; expected [{requests}, {width}] "
            f"and [{requests}]"
        )
    width = drafts.tokens.shape[1]
    if width < drafts.lens.max(initial=0):
        raise ProposerFault(f"a draft has {drafts.lens.max()} of {width} tokens; expected no more")
    if drafts.tokens.dtype.kind != "i" or drafts.lens.dtype.kind != "i":
        raise ProposerFault(
            f"drafts have tokens of {drafts.tokens.dtype} and lens of {drafts.lens.dtype}; expected int64"
        )
    counts = (*drafts.rows_per_pass, drafts.kv_skipped, drafts.kv_redone)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ProposerFault(f"drafts say that {counts} rows were processed, skipped and redone; expected integers")
    expected = {
        "confidence": (requests, width),
        "signal": (requests, width),
        "repeat_bonus": (requests, width),
        "parents": (requests, width),
        "early_exit": (requests,),
        "q": (requests, width, vocab_size),
    }
    if drafts.parents is not None and drafts.q is not None:
        raise ProposerFault("drafts have parents and q; expected trees of certain tokens")
    for name, shape in expected.items():
        column = getattr(drafts, name)
        if column is not None and tuple(column.shape) != shape:
            raise ProposerFault(f"drafts have {name} {tuple(column.shape)}; expected {shape}")


class FaultBarrier:
    """A proposer's calls, with what they return checked."""

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        on_fault: Callable[[Fault], None],
        pace: TargetPassTimer,
        clock: Callable[[], float],
        *,
        max_faults: int = 3,
    ) -> None:
        """
        Args:
            on_fault: called once a fault, for the metrics.
            pace: how long target passes take at present.
            clock: seconds.
            max_faults: faults, being late apart, after which nothing is drafted any more.
        """
        self.proposer = proposer
        self.enabled = True
        self._vocab_size = vocab_size
        self._on_fault = on_fault
        self._pace = pace
        self._clock = clock
        self._faults = FaultCounter(max_faults, _FAULTS_FORGOTTEN_AFTER)
        self._lateness = TimeoutDetector()
        self._untimed = _FIRST_DRAFTS
        self._off: set[int] = set()
        """Lanes whose request is not drafted for any more."""

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return self._call(lambda: _one_each(self.proposer.lag(batch), batch), (0,) * len(batch.ids))

    def peek(self, batch: DecodeBatch) -> Offers | None:
        return self._call(lambda: _checked(self.proposer.peek(batch), batch), None)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        """Drafts that are safe to verify."""
        plan, barred = (plan, {}) if self.enabled and not self._off else self._bar(batch, plan)
        if not any(plan.depth):
            return self._with_skipped(no_drafts(len(plan.depth)), barred)
        try:
            started = self._clock()
            drafts = self.proposer.propose(batch, plan)
            seconds = self._clock() - started
            bad = nonsense(drafts, plan, self._vocab_size)
        except Exception as error:  # whatever a proposer does, its requests go on
            self._fault("raised", "raised", error)
            self._off.update(lane for lane, depth in zip(batch.lanes.tolist(), plan.depth, strict=True) if depth)
            return self._with_skipped(no_drafts(len(plan.depth)), barred)
        if bad.any():
            self._fault("nonsense", f"returned nonsense for {', '.join(np.array(batch.ids)[bad])}")
            self._off.update(batch.lanes[bad].tolist())
            drafts.lens = np.where(bad, 0, drafts.lens)
        else:
            self._faults.good()
        self._judge_time(seconds, plan, drafts)
        return self._with_skipped(drafts, barred)

    def _judge_time(self, seconds: float, plan: SpecPlan, drafts: Drafts) -> None:
        if self._untimed:
            self._untimed -= 1
            return
        budget = self._budget(plan, drafts) if seconds > _LATE * _LEAST_BUDGET_S else None
        if self._lateness.add(budget is not None and seconds > _LATE * budget):
            self._on_fault("overrun")
            name = self.proposer.traits.name
            _log.error("the proposer %s keeps taking too long, at last %.0f ms for a draft", name, 1e3 * seconds)
            self._switch_off()

    def _budget(self, plan: SpecPlan, drafts: Drafts) -> float | None:
        """Seconds that a draft may take; None as long as the target's pace is not known."""
        pass_s = self._pace.seconds
        if pass_s is None:
            return None
        drafting = len(plan.depth) - plan.depth.count(0)
        read = drafts.rows_per_pass[0] / drafting if drafts.rows_per_pass else 0.0
        return max(_LEAST_BUDGET_S, (read + max(plan.depth)) * pass_s)

    def _bar(self, batch: DecodeBatch, plan: SpecPlan) -> tuple[SpecPlan, dict[str, str]]:
        """The plan without the requests that are not drafted for any more; those, with the reason."""
        allowed = [self.enabled and lane not in self._off for lane in batch.lanes.tolist()]
        columns = tuple(zip(batch.ids, plan.depth, allowed, strict=True))
        barred = {request: "proposer_fault" for request, depth, ok in columns if depth and not ok}
        depth, nodes = (
            tuple(k if ok else 0 for k, ok in zip(column, allowed, strict=True)) for column in (plan.depth, plan.nodes)
        )
        return plan.with_nodes(depth, nodes), barred

    def advance(self, step: TargetStep) -> None:
        self._call(lambda: self.proposer.advance(step), None)

    def commit(self, text: NewText) -> None:
        self._call(lambda: self.proposer.commit(text), None)

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        self._call(lambda: self.proposer.admit(lane, cached_blocks, cache_salt), None)

    def evict(self, lane: int) -> None:
        self._off.discard(lane)
        self._call(lambda: self.proposer.evict(lane), None)

    def _call(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Runs bookkeeping of a proposer that is still trusted; a fault in it makes its state worthless."""
        if self.enabled:
            try:
                return call()
            except Exception as error:
                self._fault("raised", "raised", error, last=True)
        return otherwise

    def _fault(self, kind: Fault, what: str, error: Exception | None = None, *, last: bool = False) -> None:
        self._on_fault(kind)
        name = self.proposer.traits.name
        _log.error("the proposer %s %s; its requests go on as plain decoding", name, what, exc_info=error)
        if self._faults.fault() or last:
            self._switch_off()

    def _switch_off(self) -> None:
        self.enabled = False
        _log.error("the proposer %s is switched off", self.proposer.traits.name)

    @staticmethod
    def _with_skipped(drafts: Drafts, barred: dict[str, str]) -> Drafts:
        drafts.skipped = {**(drafts.skipped or {}), **barred}
        return drafts


def _checked(offers: Offers | None, batch: DecodeBatch) -> Offers | None:
    """
    Raises:
        ProposerFault: not one entry a request, fewer tokens than are on offer, or numbers that are not integers.
    """
    if offers is not None:
        found, tokens = offers.found, offers.tokens
        if found.shape != (len(batch.ids), 2) or tokens.shape[:1] != found.shape[:1] or tokens.ndim != 2:
            expected = f"[{len(batch.ids)}, 2] and [{len(batch.ids)}, …]"
            raise ProposerFault(f"offers have {list(found.shape)} and tokens {list(tokens.shape)}; expected {expected}")
        if found.dtype != np.int64 or tokens.dtype != np.int64:
            raise ProposerFault(f"offers are of {found.dtype} and tokens of {tokens.dtype}; expected int64")
        if found[:, 1].max(initial=0) > tokens.shape[1]:
            raise ProposerFault(f"{found[:, 1].max()} tokens are on offer, of which there are {tokens.shape[1]}")
    return offers


def _one_each(column: tuple[_T, ...], batch: DecodeBatch) -> tuple[_T, ...]:
    """
    Raises:
        ProposerFault: not one entry a request.
    """
    if len(column) != len(batch.ids):
        raise ProposerFault(f"a column has {len(column)} entries for {len(batch.ids)} requests; expected one each")
    return column
