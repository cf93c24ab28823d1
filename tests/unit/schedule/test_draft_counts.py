from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaspec.schedule.request import DraftCounts
from unit.engine.fakes import prompt, request
from unit.schedule.driver import Driver

STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)))


@given(STEPS)
def test_totals_positions_and_steps_agree(steps: list[tuple[int, int, int]]) -> None:
    counts, summary = DraftCounts(detailed=True), DraftCounts()
    for lengths in steps:
        accepted, verified, drafted = sorted(lengths)
        for one in (counts, summary):
            one.add(drafted=drafted, verified=verified, accepted=accepted, emitted=accepted + 1)
    assert counts.drafted == sum(d for d, _ in counts.per_step) == sum(counts.drafted_per_pos)
    assert counts.accepted == sum(a for _, a in counts.per_step) == sum(counts.accepted_per_pos)
    assert counts.drafts == sum(d > 0 for d, _ in counts.per_step) == max(counts.drafted_per_pos, default=0)
    assert counts.emitted == counts.accepted + counts.drafts
    assert counts.accepted_per_pos == sorted(counts.accepted_per_pos, reverse=True)
    assert len(counts.per_step) == len(steps)
    assert len(counts.accepted_per_pos) == len(counts.drafted_per_pos)
    assert (summary.drafts, summary.drafted, summary.verified, summary.accepted) == (
        *(counts.drafts, counts.drafted, counts.verified, counts.accepted),
    )
    assert (summary.per_step, summary.drafted_per_pos) == ([], [])


def test_the_scheduler_counts_what_became_output() -> None:
    driver = Driver()
    one = request("a", prompt(6), most=40, stop_ids=[9], speculation_metrics="detailed")
    driver.add(one)
    driver.step()  # prefill
    driver.step(depth=4, accepted=2)
    driver.step()
    driver.commit(driver.plan(6), 5, tokens=[[4, 9, 5, 5, 5, 5]])  # ends with the second of five accepted
    counts = one.draft_counts
    assert counts is not None
    assert (one.steps, counts.per_step) == (3, [(4, 2), (0, 0), (6, 2)])
    assert (counts.verified, counts.emitted) == (10, 5)


def test_nothing_is_counted_where_nobody_asks() -> None:
    driver = Driver()
    one = request("a", prompt(6), most=9, speculation_metrics="off")
    driver.add(one)
    driver.step()
    driver.step(depth=4, accepted=2)
    assert (one.steps, one.draft_counts) == (1, None)
    assert one.length == 6 + 1 + 3
