"""Stop rules on traces: worked cases, and the same lengths as the engine's proposers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.propose.stopping import stop_mask
from dynaspec.simulate.drafting import draft
from dynaspec.simulate.traces import build_trace
from unit.control.seam import UNHURRIED

WIDTH = 6


def trace_of(rows):
    """One request a row, whose drafts from position 0 see these confidences."""
    size = len(rows)
    signal = np.array(rows, dtype=np.float64).reshape(-1)
    output = np.full(size, len(rows[0]))
    runs = np.concatenate([np.arange(n, 0, -1) for n in output])
    return build_trace(np.ones(size, dtype=np.int64), output, runs, confidence=signal, stray=np.zeros(len(signal)))


def lengths(rows, depth, rule):
    trace = trace_of(rows)
    drafted = draft(trace, trace.first, trace.output, np.array(depth), rule)
    return drafted.lens.tolist()


ROWS = [[0.9, 0.8, 0.3, 0.9], [0.7, 0.2, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]]


def test_each_request_keeps_the_token_that_fell_below():
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.5,))) == [3, 2, 4]
    assert lengths(ROWS, [2, 1, 0], StopRule(below=(0.5,))) == [2, 1, 0]


def test_thresholds_by_position_go_on_with_the_last():
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.8, 0.0, 0.0))) == [4, 1, 4]
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.0, 0.85))) == [2, 2, 4]


def test_the_mean_of_those_still_drafting():
    # Means over the rows: 0.83, 0.63, 0.70.
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.65,), scope="batch_mean")) == [2, 2, 2]
    # Without the second from the second pass on: 0.85, 0.6.
    assert lengths(ROWS, [4, 1, 4], StopRule(below=(0.65,), scope="batch_mean")) == [3, 1, 3]


def test_the_chance_that_all_of_a_draft_is_accepted():
    # 0.9, 0.72, 0.22; 0.7, 0.14; 0.9, 0.81, 0.73, 0.66.
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.7,), signal="survival")) == [3, 2, 4]
    doubtful = StopRule(below=(0.7,), signal="survival", offset=(-5.0, 0.0, 0.0))
    assert lengths(ROWS, [4, 4, 4], doubtful) == [1, 2, 4]
    at_once = StopRule(below=(0.7,), signal="survival", bias=(-5.0, 0.0))
    assert lengths(ROWS, [4, 4, 4], at_once) == [1, 1, 1]


@pytest.mark.parametrize(
    ("total_below", "expected"), [(0.5, [4, 2, 4]), (0.6, [3, 2, 3]), (1.2, [2, 2, 2]), (9.0, [1, 1, 1])]
)
def test_a_pass_that_does_not_pay_ends_all_drafts(total_below, expected):
    # Survival beyond 0.2 of those that go on: 0.7 + 0.5 + 0.7, 0.52 + 0.61, 0.02 + 0.53.
    rule = StopRule(below=(0.2,), signal="survival", total_below=(total_below,))
    assert lengths(ROWS, [4, 4, 4], rule) == expected


def test_behind_the_first_miss_the_drafter_strays():
    runs = np.array([1, 0, 0, 0])
    trace = build_trace(np.array([1]), np.array([4]), runs, confidence=np.full(4, 0.8), stray=np.full(4, 0.1))
    drafted = draft(trace, trace.first, trace.output, np.array([4]), None)
    assert drafted.view().confidence == ((0.8, 0.8, 0.1, 0.1),)


def test_without_a_signal_there_is_none():
    trace = build_trace(np.array([1]), np.array([4]), np.array([1, 0, 0, 0]))
    view = draft(trace, trace.first, trace.output, np.array([3]), None).view()
    assert (view.length, view.confidence) == ((3,), ((),))


probabilities = st.floats(2**-10, 1 - 2**-10, width=32)
columns = st.lists(st.floats(-2.0, 2.0), min_size=1, max_size=WIDTH).map(tuple)


@st.composite
def rules(draw):
    return StopRule(
        below=tuple(draw(st.lists(st.floats(0.0, 0.9), min_size=1, max_size=WIDTH))),
        scope=draw(st.sampled_from(["request", "batch_mean"])),
        signal=draw(st.sampled_from(["confidence", "token_prob", "survival"])),
        weight=draw(st.floats(0.0, 3.0)),
        bias=draw(columns),
        offset=tuple(draw(st.lists(st.floats(-2.0, 2.0), min_size=3, max_size=3))),
    )


@UNHURRIED
@given(
    st.lists(st.lists(probabilities, min_size=WIDTH, max_size=WIDTH), min_size=3, max_size=3),
    st.lists(st.integers(1, WIDTH), min_size=3, max_size=3),
    rules(),
)
def test_drafts_end_where_the_engine_ends_them(rows, depth, rule):
    mask = stop_mask(rule, np.array(depth, dtype=np.int64), torch.device("cpu"))
    running = np.arange(3)
    for done in range(1, WIDTH + 1):
        shown = torch.tensor([rows[i][done - 1] for i in running], dtype=torch.float64)
        signal = shown.logit().clamp(-LOGIT_RANGE, LOGIT_RANGE) if rule.signal == "survival" else shown
        mask.update(done, running, signal.float())
        running = mask.running(done)
        if not running.size:
            break
    ours, engine = np.array(lengths(rows, depth, rule)), mask.lengths()
    if rule.signal != "survival" or rule.scope == "batch_mean":
        # Thresholds are compared in single precision there: a tie may fall the other way.
        near = [abs(c - below) < 1e-6 for row in rows for c in row for below in rule.below]
        if any(near):
            return
    assert ours.tolist() == engine.tolist()


@pytest.mark.parametrize("depth", [[0, 0, 0], [1, 0, 2]])
def test_nothing_granted_nothing_drafted(depth):
    assert lengths(ROWS, depth, StopRule(below=(0.0,))) == depth
