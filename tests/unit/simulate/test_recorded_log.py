"""A simulated engine writes a decision log; the trace read from it is the simulated one, as far as it was seen."""

from __future__ import annotations

import numpy as np
import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.observe.decision_log import DecisionLog, LoggedController
from dynaspec.simulate import arrivals as at
from dynaspec.simulate.recorded import load_trace
from dynaspec.simulate.simulator import HostConfig, simulate
from dynaspec.simulate.synthetic import Lengths
from unit.simulate.scenes import flat_costs, production, synthetic

HOST = HostConfig(max_num_seqs=4)


def logged(path, trace, **keys):
    log = DecisionLog(path)
    simulate(
        trace,
        at.rollout(len(trace)),
        flat_costs(),
        lambda limits: LoggedController(production(**keys)(limits), log),
        HOST,
    )
    log.close()


def by_prompt(trace):
    """Requests in an order that does not depend on who was seen first."""
    return trace.take(np.argsort(trace.prompt, kind="stable"))


def test_long_drafts_give_the_trace_back(tmp_path):
    trace = synthetic(30, 0.5, prompt=Lengths(150, 0.4), output=Lengths(40), max_tokens=500, concentration=1e6)
    trace = trace.take(np.unique(trace.prompt, return_index=True)[1])
    logged(tmp_path / "log", trace, num_speculative_tokens=16, policy="constant")
    read = by_prompt(load_trace(tmp_path / "log", np.random.default_rng(0)))
    for column in ("prompt", "output", "max_tokens"):
        assert np.array_equal(getattr(read, column), getattr(trace, column)), column
    # No draft of 16 was accepted whole, so every position behind the first was tested.
    behind = np.arange(len(trace.runs)) - np.repeat(trace.first, trace.output) > 0
    assert np.array_equal(read.runs[behind], trace.runs[behind])
    size = len(trace.runs)
    assert read.confidence[:size][behind] == pytest.approx(trace.confidence[:size][behind])


def test_what_was_not_seen_is_filled_in_at_the_request_s_rate(tmp_path):
    trace = synthetic(200, 0.7, output=Lengths(60))
    logged(tmp_path / "log", trace, num_speculative_tokens=1, policy="constant")
    read = load_trace(tmp_path / "log", np.random.default_rng(0))
    assert read.survival(3) == pytest.approx(trace.survival(3), abs=0.03)


def test_a_log_without_drafts(tmp_path):
    logged(tmp_path / "log", synthetic(3))
    with pytest.raises(ConfigError, match="no draft was verified"):
        load_trace(tmp_path / "log", np.random.default_rng(0))


def test_a_log_of_another_version(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"format": "dynaspec-decision-log", "version": 999}\n')
    with pytest.raises(ConfigError, match="version"):
        load_trace(path, np.random.default_rng(0))
