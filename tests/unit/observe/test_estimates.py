"""What is read of a controller's estimates, and what is left out because it cannot be true."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.observe.estimates import MODES, Estimates, Probe, ProposerEstimates, SignalFit, read_estimates

DOCUMENT: dict[str, Any] = {
    "mode": "speculate",
    "expected_tokens": 6.0,
    "expected_step_s": 0.012,
    "plain_goodput": 200.0,
    "draft_goodput": 500,
    "plain_measured_over_expected": 1.1,
    "draft_measured_over_expected": 0.97,
    "token_price_s": 0.002,
    "stop_below": [0.27, 0.0, math.inf],
    "stop_all_below": [0.1],
    "host_s": 0.001,
    "speed_factor": 1.2,
    "change_steps": 0.5,
    "probe_budget_steps": -0.3,
    "last_probe": {"mode": "draft", "steps": 4, "cost_steps": -0.5, "steps_ago": 9},
    "target_curve": [[1.0, 0.01]],
    "proposers": {
        "draft_model": {
            "acceptance": [0.8, 1.5],
            "signal": {"weight": 0.7, "bias": [0.1, -0.2]},
            "cost": {"start_s": -1e-5, "pass_s": 1e-3},
        }
    },
}
NUMBERS = (
    "expected_tokens", "expected_step_s", "plain_goodput", "draft_goodput", "plain_measured_over_expected",
    "draft_measured_over_expected", "token_price_s", "speed_factor", "change_steps",
)  # fmt: skip


def test_a_document_with_types() -> None:
    assert read_estimates(DOCUMENT) == Estimates(
        mode="speculate",
        expected_tokens=6.0,
        expected_step_s=0.012,
        plain_goodput=200.0,
        draft_goodput=500.0,
        plain_measured_over_expected=1.1,
        draft_measured_over_expected=0.97,
        token_price_s=0.002,
        stop_below=(0.27, None, 1.0),
        speed_factor=1.2,
        change_steps=0.5,
        last_probe=Probe("draft", 4, -0.5, 9),
        proposers={
            "draft_model": ProposerEstimates((0.8, None), SignalFit(0.7, (0.1, -0.2)), {"pass_s": 1e-3}),
        },
    )


def test_goodputs_that_follow() -> None:
    found = read_estimates(DOCUMENT)
    assert found.expected_goodput == pytest.approx(500.0)
    assert found.speedup == 2.5
    nothing = read_estimates(DOCUMENT | {"draft_goodput": 0.0})
    assert (nothing.draft_goodput, nothing.speedup) == (0.0, None)
    assert read_estimates(DOCUMENT | {"expected_step_s": 5e-324}).expected_goodput is None
    assert read_estimates({}).expected_goodput is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.82, "fast", None, True, [1.0], {}, 10**400])
def test_numbers_that_cannot_be_are_left_out(wrong: object) -> None:
    found = read_estimates(dict.fromkeys(NUMBERS, wrong))
    assert [getattr(found, name) for name in NUMBERS] == [None] * len(NUMBERS)


@pytest.mark.parametrize(
    "change", [{"mode": "speculate"}, {"steps": 0}, {"steps": 1.5}, {"cost_steps": math.nan}, {"steps_ago": -1}]
)
def test_a_probe_that_cannot_be_is_left_out(change: dict[str, Any]) -> None:
    assert read_estimates(DOCUMENT | {"last_probe": DOCUMENT["last_probe"] | change}).last_probe is None


@pytest.mark.parametrize("signal", [{"weight": "x"}, {"bias": [0.0]}, {"weight": 1.0, "bias": [math.nan]}, [1], None])
def test_a_signal_that_cannot_be_is_left_out(signal: object) -> None:
    found = read_estimates({"proposers": {"ngram": {"signal": signal}}})
    assert found.proposers == {"ngram": ProposerEstimates()}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(MODES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*DOCUMENT, "mode", "bias"]), inner),
    max_leaves=6,
)


@given(document=st.dictionaries(st.sampled_from([*DOCUMENT]), values))
def test_any_document_can_be_read(document: dict[str, Any]) -> None:
    found = read_estimates(document)
    known = [value for name in NUMBERS if (value := getattr(found, name)) is not None and name != "draft_goodput"]
    assert all(math.isfinite(value) and value > 0.0 for value in known)
