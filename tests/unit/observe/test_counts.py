from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.contract.step import StepOutcome, Work
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.stats import SpecStats
from support.step_counts import counts_of


def outcome(**columns: Any) -> StepOutcome:
    """Four requests: two drafts of three and one, one that found nothing, one that was not asked."""
    values: dict[str, Any] = {
        "plan_step": 1,
        "ids": ("a", "b", "c", "d"),
        "proposer": (0, 0, 0, 0),
        "requested": (4, 4, 2, 0),
        "drafted": (3, 1, 0, 0),
        "verified": (3, 1, 0, 0),
        "accepted": (2, 1, 0, 0),
        "emitted": (3, 2, 1, 1),
        "ended": ("rejected", "all_accepted", "none", "none"),
        "early_exit": (True, True, False, False),
        "confidence": ((), (), (), ()),
        "work": Work(rows_per_pass=(2, 1, 1), verify_rows=8, prefill_rows=5, kv_skipped=2, kv_redone=1),
        "draft_s": 0.25,
        "verify_s": 0.5,
        "step_s": 1.0,
    }
    return StepOutcome(**values | columns)


COLUMNS = ("ids", "proposer", "requested", "drafted", "verified", "accepted", "emitted", "ended")
NOBODY = dict.fromkeys((*COLUMNS, "early_exit", "confidence"), ())


class TestOneStep:
    counts = counts_of(outcome())

    def test_drafts_are_request_steps_with_a_draft(self) -> None:
        assert (self.counts.request_steps, self.counts.drafts) == (4, 2)

    def test_tokens(self) -> None:
        c = self.counts
        assert (c.draft_tokens, c.verified, c.accepted, c.emitted, c.draft_emitted) == (4, 4, 3, 7, 5)

    def test_positions(self) -> None:
        assert self.counts.drafted_per_pos == (2, 1, 1)
        assert self.counts.accepted_per_pos == (2, 1)
        assert sum(self.counts.drafted_per_pos) == self.counts.draft_tokens
        assert sum(self.counts.accepted_per_pos) == self.counts.accepted

    def test_dynamic_length_counters(self) -> None:
        assert (self.counts.proposals, self.counts.early_exits, self.counts.tokens_requested) == (3, 2, 10)

    def test_gated_writes(self) -> None:
        assert (self.counts.kv_skipped, self.counts.kv_redone) == (2, 1)

    def test_passes_and_times(self) -> None:
        c = self.counts
        assert (c.steps, c.target_passes, c.drafter_passes, c.prefill_rows) == (1, 1, 3, 5)
        assert (c.draft_s, c.verify_s, c.step_s) == (0.25, 0.5, 1.0)

    def test_ratios(self) -> None:
        assert self.counts.mean_acceptance_length == 5 / 2
        assert self.counts.tokens_per_request_step == 7 / 4
        assert self.counts.draft_acceptance_rate == 3 / 4
        assert self.counts.rate_per_position == (1.0, 0.5)


def test_a_prefill_alone_is_a_target_pass() -> None:
    assert counts_of(outcome(**NOBODY, work=Work(prefill_rows=9))).target_passes == 1
    assert counts_of(outcome(**NOBODY, work=Work())).target_passes == 0


def test_nothing_has_no_ratios() -> None:
    counts = SpecCounts()
    assert counts.mean_acceptance_length is None
    assert counts.tokens_per_request_step is None
    assert counts.draft_acceptance_rate is None
    assert counts.rate_per_position == ()


def test_ratios_of_sums_are_not_sums_of_ratios() -> None:
    short = outcome(drafted=(1, 0, 0, 0), accepted=(0, 0, 0, 0), emitted=(1, 1, 1, 1))
    both = counts_of(outcome()) + counts_of(short)
    assert both.mean_acceptance_length == 6 / 3
    assert both.draft_acceptance_rate == 3 / 5
    assert both.rate_per_position == (2 / 3, 1 / 3)


def test_a_difference_is_what_happened_in_between() -> None:
    stats = SpecStats()
    stats.record(outcome())
    stats.skip({"no_match": 1})
    before = stats.snapshot()
    later = outcome(drafted=(1, 1, 0, 0), accepted=(1, 0, 0, 0))
    stats.record(later)
    stats.skip({"catching_up": 2})
    stats.preemption()
    span = stats.snapshot() - before
    assert span == counts_of(later) + SpecCounts(skipped={"catching_up": 2}, preemptions=1)
    assert span.drafted_per_pos == (2,)


def test_nothing_is_left_of_a_difference_with_itself() -> None:
    stats = SpecStats()
    stats.record(outcome())
    stats.skip({"no_match": 1})
    assert stats.snapshot() - stats.snapshot() == SpecCounts()


def test_a_snapshot_does_not_change() -> None:
    stats = SpecStats()
    stats.skip({"no_match": 1})
    before = stats.snapshot()
    stats.skip({"no_match": 1})
    stats.record(outcome())
    assert before == SpecCounts(skipped={"no_match": 1})


def test_merging_adds_another_engines_totals() -> None:
    one, other = SpecStats(), SpecStats()
    for stats in (one, other):
        stats.record(outcome())
        stats.skip({"no_match": 1})
    other.proposer_fault("raised")
    one.merge(other.snapshot())
    total = one.snapshot()
    assert (total.drafts, total.drafted_per_pos, total.skipped) == (4, (4, 2, 2), {"no_match": 2})
    assert (total.proposer_faults, total.faults) == (1, {"raised": 1})
    assert (total - other.snapshot()).faults == {}


@pytest.mark.parametrize("counts", [SpecCounts(), counts_of(outcome())], ids=["empty", "one step"])
def test_as_dict_is_json_with_counts_and_ratios(counts: SpecCounts) -> None:
    values = counts.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert {f.name for f in fields(counts)} < set(values)
    assert values["mean_acceptance_length"] == counts.mean_acceptance_length


@st.composite
def outcomes(draw: st.DrawFn) -> StepOutcome:
    """Steps as hosts have them; seconds are multiples of 1/8, whose sums are exact."""
    rows = draw(st.lists(st.tuples(*[st.integers(0, 6)] * 4, st.booleans()), max_size=4))
    requested = [most for most, *_ in rows]
    drafted = [min(a, b) for a, b, *_ in rows]
    verified = [min(n, c) for n, (_, _, c, _, _) in zip(drafted, rows, strict=True)]
    accepted = [min(n, d) for n, (_, _, _, d, _) in zip(verified, rows, strict=True)]
    early = [stopped and n < k for n, k, (*_, stopped) in zip(drafted, requested, rows, strict=True)]
    count, seconds = st.integers(0, 9), st.integers(0, 40).map(lambda n: n / 8)
    return StepOutcome(
        plan_step=0,
        ids=tuple("abcd"[: len(rows)]),
        proposer=(0,) * len(rows),
        requested=tuple(requested),
        drafted=tuple(drafted),
        verified=tuple(verified),
        accepted=tuple(accepted),
        emitted=tuple(n + 1 for n in accepted),
        ended=("none",) * len(rows),
        early_exit=tuple(early),
        confidence=((),) * len(rows),
        work=Work(tuple(draw(st.lists(count, max_size=3))), draw(count), draw(count), draw(count), draw(count)),
        draft_s=draw(seconds),
        verify_s=draw(seconds),
        step_s=draw(seconds),
    )


REASONS = st.lists(st.sampled_from(["no_match", "catching_up", "drafter_length"]), max_size=3)


@given(st.lists(st.tuples(outcomes(), REASONS), max_size=8), st.integers(0, 8))
@settings(max_examples=150)
def test_totals_are_the_sum_of_the_steps(steps: list[tuple[StepOutcome, list[str]]], cut: int) -> None:
    stats, total, before = SpecStats(), SpecCounts(), SpecCounts()
    for step, (result, reasons) in enumerate(steps):
        if step == cut:
            before = stats.snapshot()
            assert before == total
        stats.record(result)
        stats.skip(Counter(reasons))
        total = total + counts_of(result) + SpecCounts(skipped={name: reasons.count(name) for name in reasons})
    snapshot = stats.snapshot()
    assert snapshot == total
    assert snapshot.as_dict() == total.as_dict()
    other = SpecStats()
    other.merge(snapshot - before)
    other.merge(before)
    assert other.snapshot() == total


def test_a_snapshot_holds_whole_steps_only() -> None:
    """Another thread never sees half of what a step added."""
    stats, torn = SpecStats(), []
    wide = outcome(emitted=(3, 2, 1, 1))

    def watch() -> None:
        while not done:
            seen = stats.snapshot()
            if (seen.emitted, seen.draft_tokens, sum(seen.accepted_per_pos)) != (
                7 * seen.steps,
                4 * seen.steps,
                3 * seen.steps,
            ):
                torn.append(seen)

    done: list[bool] = []
    watcher = Thread(target=watch)
    watcher.start()
    for _ in range(4000):
        stats.record(wide)
    done.append(True)
    watcher.join()
    assert torn == []
    assert stats.snapshot().steps == 4000
