from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, NewText, Offers, ProposerNeeds
from dynaspec.contract.step import ProposerTraits, SpecPlan
from dynaspec.propose.guard import FaultBarrier, TargetPassTimer
from unit.propose.batches import batch, offered, plan, target

VOCAB = 8


class Faulty:
    """Drafts token 1; then ``spoil`` has its way with the drafts."""

    traits = ProposerTraits(name="faulty")
    needs = ProposerNeeds()

    def __init__(self, spoil: Callable[[Drafts], Any] = lambda drafts: None) -> None:
        self.spoil = spoil
        self.depths: list[tuple[int, ...]] = []
        self.broken = ""

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return self._book("lag", (3,) * len(batch.ids))

    def peek(self, batch: DecodeBatch) -> Offers | None:
        return self._book("peek", offered(((1, 2),) * len(batch.ids)))

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        self.depths.append(plan.depth)
        size, width = len(plan.depth), max(plan.depth)
        lens = np.array(plan.depth, dtype=np.int64)
        drafts = Drafts(
            tokens=np.ones((size, width), dtype=np.int64),
            lens=lens,
            confidence=np.full((size, width), 0.5, dtype=np.float32),
            signal=np.full((size, width), -2.5, dtype=np.float32),
            q=torch.full((size, width, VOCAB), 1 / VOCAB),
            early_exit=np.zeros(size, dtype=np.bool_),
        )
        replaced = self.spoil(drafts)
        return drafts if replaced is None else replaced

    def advance(self, step: object) -> None:
        self._book("advance", None)

    def commit(self, text: NewText) -> None:
        self._book("commit", None)

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        self._book("admit", None)

    def evict(self, lane: int) -> None:
        self._book("evict", None)

    def _book(self, name: str, value: Any) -> Any:
        if self.broken == name:
            raise RuntimeError(name)
        return value


class Desk:
    def __init__(self, spoil: Callable[[Drafts], Any] = lambda drafts: None, *, max_faults: int = 3) -> None:
        self.proposer = Faulty(spoil)
        self.kinds: list[str] = []
        self.now = 100.0
        self.pace = TargetPassTimer()
        self.guard = FaultBarrier(
            self.proposer, VOCAB, self.kinds.append, self.pace, lambda: self.now, max_faults=max_faults
        )
        self.batch = batch([1, 2], [3, 4], [5, 6])

    @property
    def faults(self) -> int:
        return len(self.kinds)

    def propose(self, *depth: int) -> Drafts:
        return self.guard.propose(self.batch, plan(*depth))

    def takes(self, seconds: float, *, rows: tuple[int, ...] = ()) -> None:
        """From now on, a draft takes this long, and says that its passes had these rows."""

        def spoil(drafts: Drafts) -> None:
            self.now += seconds
            drafts.rows_per_pass = rows

        self.proposer.spoil = spoil


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_good_drafts_pass_untouched() -> None:
    desk = Desk()
    drafts = desk.propose(2, 0, 3)
    assert (drafts.lens.tolist(), desk.faults, drafts.skipped) == ([2, 0, 3], 0, {})


def _negative_token(drafts: Drafts) -> None:
    drafts.tokens[1, 0] = -1


def _token_outside(drafts: Drafts) -> None:
    drafts.tokens[1, 1] = VOCAB


def _too_long(drafts: Drafts) -> None:
    drafts.lens[1] = 3


def _negative_length(drafts: Drafts) -> None:
    drafts.lens[1] = -1


def _nan_confidence(drafts: Drafts) -> None:
    assert drafts.confidence is not None
    drafts.confidence[1, 0] = np.nan


def _nan_evidence(drafts: Drafts) -> None:
    assert drafts.signal is not None
    drafts.signal[1, 1] = np.nan


def _infinite_evidence(drafts: Drafts) -> None:
    assert drafts.signal is not None
    drafts.signal[1, 0] = np.inf


def _nan_q(drafts: Drafts) -> None:
    assert drafts.q is not None
    drafts.q[1, 0] = float("nan")


@pytest.mark.parametrize(
    "spoil",
    [
        *(_negative_token, _token_outside, _too_long, _negative_length),
        *(_nan_confidence, _nan_evidence, _infinite_evidence, _nan_q),
    ],
)
def test_nonsense_in_a_row_costs_that_request_its_speculation(spoil: Callable[[Drafts], None]) -> None:
    desk = Desk(spoil)
    assert desk.propose(3, 2, 3).lens.tolist() == [3, 0, 3]
    assert (desk.kinds, desk.guard.enabled) == (["nonsense"], True)
    desk.proposer.spoil = lambda drafts: None
    drafts = desk.propose(3, 2, 3)
    assert (drafts.lens.tolist(), drafts.skipped) == ([3, 0, 3], {"b": "proposer_fault"})
    assert desk.proposer.depths[-1] == (3, 0, 3)
    desk.guard.evict(1)  # the next request on the lane is drafted for again
    assert desk.propose(3, 2, 3).lens.tolist() == [3, 2, 3]


def test_padding_may_hold_anything() -> None:
    def spoil(drafts: Drafts) -> None:
        assert drafts.confidence is not None
        assert drafts.signal is not None
        drafts.tokens[0, 1:], drafts.confidence[0, 1:], drafts.signal[0, 1:] = -5, np.nan, np.nan

    desk = Desk(spoil)
    assert desk.propose(1, 3, 3).lens.tolist() == [1, 3, 3]
    assert desk.faults == 0


def test_signals_are_no_must() -> None:
    def spoil(drafts: Drafts) -> None:
        drafts.confidence = drafts.signal = None

    desk = Desk(spoil)
    assert desk.propose(1, 3, 3).lens.tolist() == [1, 3, 3]
    assert desk.faults == 0


def _raise(drafts: Drafts) -> None:
    raise ZeroDivisionError


def _none_at_all(drafts: Drafts) -> object:
    return "nothing"


def _tokens_short(drafts: Drafts) -> None:
    drafts.tokens = drafts.tokens[:2]


def _tokens_narrow(drafts: Drafts) -> None:
    drafts.tokens = drafts.tokens[:, :1]


def _tokens_flat(drafts: Drafts) -> None:
    drafts.tokens = drafts.tokens[:, 0]


def _tokens_float(drafts: Drafts) -> None:
    drafts.tokens = drafts.tokens.astype(np.float64)


def _lens_short(drafts: Drafts) -> None:
    drafts.lens = drafts.lens[:2]


def _lens_float(drafts: Drafts) -> None:
    drafts.lens = drafts.lens.astype(np.float64)


def _confidence_short(drafts: Drafts) -> None:
    assert drafts.confidence is not None
    drafts.confidence = drafts.confidence[:1]


def _evidence_narrow(drafts: Drafts) -> None:
    assert drafts.signal is not None
    drafts.signal = drafts.signal[:, :1]


def _early_exit_short(drafts: Drafts) -> None:
    assert drafts.early_exit is not None
    drafts.early_exit = drafts.early_exit[:1]


def _q_of_another_vocabulary(drafts: Drafts) -> None:
    assert drafts.q is not None
    drafts.q = drafts.q[..., :-1]


@pytest.mark.parametrize(
    "spoil",
    [
        *(_raise, _none_at_all, _tokens_short, _tokens_narrow, _tokens_flat, _tokens_float, _lens_short),
        *(_lens_float, _confidence_short, _evidence_narrow, _early_exit_short, _q_of_another_vocabulary),
    ],
)
def test_a_fault_of_the_whole_costs_all_that_were_to_draft(spoil: Callable[[Drafts], None]) -> None:
    desk = Desk(spoil)
    drafts = desk.propose(3, 0, 3)
    assert (drafts.lens.tolist(), drafts.tokens.shape, desk.kinds) == ([0, 0, 0], (3, 0), ["raised"])
    desk.proposer.spoil = lambda drafts: None
    drafts = desk.propose(3, 2, 3)
    assert (drafts.lens.tolist(), drafts.skipped) == ([0, 2, 0], {"a": "proposer_fault", "c": "proposer_fault"})


def test_after_some_faults_nothing_is_drafted_any_more() -> None:
    desk = Desk(_raise, max_faults=2)
    desk.propose(1, 0, 0)
    assert desk.guard.enabled
    desk.propose(0, 1, 0)
    assert not desk.guard.enabled
    drafts = desk.propose(1, 1, 1)
    assert (drafts.lens.tolist(), len(desk.proposer.depths), desk.faults) == ([0, 0, 0], 2, 2)
    assert drafts.skipped == dict.fromkeys("abc", "proposer_fault")
    assert (desk.guard.lag(desk.batch), desk.guard.peek(desk.batch)) == ((0, 0, 0), None)


def test_faults_with_a_thousand_good_drafts_between_do_not_add_up() -> None:
    desk = Desk(max_faults=2)
    for lane, good in enumerate((1000, 999, 0)):
        desk.proposer.spoil = _raise
        desk.propose(*(int(i == lane) for i in range(3)))
        desk.guard.evict(lane)
        assert desk.guard.enabled == (lane < 2)
        desk.proposer.spoil = lambda drafts: None
        for _ in range(good):
            desk.propose(1, 1, 1)
    assert desk.faults == 3


@pytest.mark.parametrize("name", ["lag", "peek", "advance", "commit", "admit", "evict"])
def test_a_fault_in_the_books_switches_the_proposer_off(name: str) -> None:
    desk = Desk()
    assert desk.guard.lag(desk.batch) == (3, 3, 3)
    desk.proposer.broken = name
    calls: dict[str, Callable[[], object]] = {
        "lag": lambda: desk.guard.lag(desk.batch),
        "peek": lambda: desk.guard.peek(desk.batch),
        "advance": lambda: desk.guard.advance(target([0], [2], [0])),
        "commit": lambda: desk.guard.commit(NewText(*[desk.batch.lanes] * 4)),
        "admit": lambda: desk.guard.admit(0, (), ""),
        "evict": lambda: desk.guard.evict(0),
    }
    assert calls[name]() == {"lag": (0, 0, 0)}.get(name)
    assert (desk.guard.enabled, desk.faults) == (False, 1)
    assert desk.propose(1, 1, 1).lens.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "offers",
    [
        offered(((1, 2),) * 2),
        Offers(np.ones((3, 2), np.int64), np.zeros((3, 0), np.int64)),
        Offers(np.ones((3, 2), np.int64), np.zeros((2, 4), np.int64)),
        Offers(np.ones((3, 2), np.int64), np.zeros(3, np.int64)),
        Offers(np.ones((3, 2)), np.zeros((3, 4), np.int64)),
        Offers(np.ones((3, 2), np.int64), np.zeros((3, 4))),
        ((1, 2),) * 3,
    ],
    ids=[
        "one is missing",
        "no tokens",
        "too few rows",
        "no table",
        "no integers",
        "no integers as tokens",
        "no offers",
    ],
)
def test_offers_of_the_wrong_form_switch_the_proposer_off(offers: Any) -> None:
    desk = Desk()
    desk.proposer.peek = lambda batch: offers  # type: ignore[method-assign]
    assert desk.guard.peek(desk.batch) is None
    assert (desk.guard.enabled, desk.faults) == (False, 1)


def test_where_nothing_is_asked_for_the_proposer_is_not_called() -> None:
    desk = Desk(_raise)
    assert desk.propose(0, 0, 0).lens.tolist() == [0, 0, 0]
    assert (desk.proposer.depths, desk.faults) == ([], 0)


@pytest.fixture
def timed() -> Desk:
    """A target that takes 0.1 s for a pass, and a proposer that has drafted in time so far."""
    desk = Desk()
    for _ in range(8):
        desk.pace.record(0.1)
    for _ in range(3):
        desk.propose(1, 1, 1)
    return desk


def is_late(desk: Desk, *depth: int) -> bool:
    """Whether many drafts like this switch the proposer off, which is on again afterwards."""
    for _ in range(15):
        desk.propose(*depth)
    late, desk.guard.enabled = not desk.guard.enabled, True
    return late


def test_a_draft_may_take_three_times_what_decoding_its_tokens_would(timed: Desk) -> None:
    """The longest of 4 tokens: 0.4 s."""
    timed.takes(1.19)
    assert not is_late(timed, 2, 0, 4)
    timed.takes(1.21)
    assert is_late(timed, 2, 0, 4)


def test_being_late_as_a_rule_switches_the_proposer_off_but_the_drafts_are_good(timed: Desk) -> None:
    timed.takes(1.21)
    for number in range(1, 9):
        assert timed.propose(2, 0, 4).lens.tolist() == [2, 0, 4]
        assert timed.guard.enabled == (number < 8)
    assert timed.kinds == ["overrun"]
    drafts = timed.propose(2, 0, 4)
    assert (drafts.lens.tolist(), drafts.skipped) == ([0, 0, 0], {"a": "proposer_fault", "c": "proposer_fault"})
    assert len(timed.proposer.depths) == 11


def test_being_late_now_and_then_is_the_machines_doing(timed: Desk) -> None:
    for _ in range(100):
        for seconds in (5.0, 0.0, 0.0):
            timed.takes(seconds)
            timed.propose(1, 1, 1)
    assert (timed.guard.enabled, timed.faults) == (True, 0)


def test_reading_what_it_has_missed_is_work_too(timed: Desk) -> None:
    """120 rows for two requests take as long as 60 passes."""
    timed.takes(3 * 0.1 * 62 - 0.01, rows=(120, 2))
    assert not is_late(timed, 2, 0, 2)
    timed.takes(3 * 0.1 * 62 + 0.01, rows=(120, 2))
    assert is_late(timed, 2, 0, 2)


def test_however_fast_the_target_a_draft_has_a_least_budget(timed: Desk) -> None:
    for _ in range(31):
        timed.pace.record(1e-4)
    timed.takes(0.149)
    assert not is_late(timed, 1, 0, 0)
    timed.takes(0.151)
    assert is_late(timed, 1, 0, 0)


def test_the_first_drafts_are_no_measure() -> None:
    desk = Desk()
    desk.takes(100.0)
    for _ in range(7):
        desk.pace.record(1e-3)
    assert not is_late(desk, 1, 1, 1)  # the target's pace is not known
    desk.pace.record(1e-3)
    assert is_late(desk, 1, 1, 1)
    fresh = Desk()
    fresh.takes(100.0)
    for _ in range(8):
        fresh.pace.record(1e-3)
    for _ in range(3 + 7):
        fresh.propose(1, 1, 1)
    assert fresh.guard.enabled
    fresh.propose(1, 1, 1)
    assert not fresh.guard.enabled
