"""Which rival counts on vLLM, and what is said of it."""

from __future__ import annotations

import pytest

from hosts_vllm import OURS, PLAIN, SCHEDULED, SHIFT, Result, as_document, verdict

ROUNDS = 4


def rates(**by_side: float) -> dict[str, tuple[float, ...]]:
    """The same in every round."""
    return {name.replace("_", "-"): (value,) * ROUNDS for name, value in by_side.items()}


def result(**workloads: dict[str, tuple[float, ...]]) -> Result:
    return Result("0.32", {name.removeprefix("at_"): found for name, found in workloads.items()})


def test_plain_decoding_is_a_rival_at_a_load_but_not_over_what_changes() -> None:
    sides = rates(plain=100.0, fixed_1=80.0, fixed_2=90.0, scheduler=120.0, dynaspec=95.0)
    found = result(at_16=sides, **{SHIFT: sides})
    assert (found.best_rival("16"), found.best_rival(SHIFT)) == (PLAIN, "fixed-2")
    assert found.ratio("16", PLAIN) == (pytest.approx(0.95), pytest.approx(0.95))
    assert found.ratio(SHIFT, "fixed-2")[0] == pytest.approx(95 / 90)


def test_the_scheduler_over_vllm_s_drafter_is_no_rival_and_is_reported() -> None:
    found = result(at_16=rates(plain=100.0, fixed_1=80.0, scheduler=85.0, dynaspec=98.0))
    assert found.best_rival("16") == PLAIN
    assert found.ratio("16", PLAIN, SCHEDULED)[0] == pytest.approx(0.85)
    said = verdict(found)
    assert "reached" in said
    assert "0.850 (16)" in said
    assert set(as_document(found, {})["workloads"]["16"]["tokens_per_s"]) == {PLAIN, "fixed-1", SCHEDULED, OURS}


def test_the_verdict_names_each_workload_that_missed() -> None:
    found = result(
        at_1=rates(plain=100.0, fixed_1=80.0, scheduler=85.0, dynaspec=97.0),
        at_16=rates(plain=100.0, fixed_1=80.0, scheduler=85.0, dynaspec=96.9),
    )
    assert "missed at 16 (0.969)\n" in verdict(found)
