from __future__ import annotations

import numpy as np
import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.simulate import arrivals as at
from dynaspec.simulate.comparison import Case, spread_over_nodes
from unit.simulate.scenes import synthetic


def rng():
    return np.random.default_rng(5)


def test_poisson():
    times = at.poisson(20_000, 4.0, rng()).times
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)


def test_bursts_come_together_at_the_same_rate():
    times = at.bursts(20_000, 4.0, 10, rng()).times
    assert len(np.unique(times)) == 2000
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.1)
    assert len(at.bursts(7, 4.0, 3, rng()).times) == 7


def test_a_shift_of_the_rate():
    times = at.shift(20_000, [1.0, 10.0], rng()).times
    assert np.diff(times[:10_000]).mean() == pytest.approx(1.0, rel=0.05)
    assert np.diff(times[10_000:]).mean() == pytest.approx(0.1, rel=0.05)


def test_rollout_and_closed_loop():
    assert at.rollout(5).times.tolist() == [0.0] * 5
    assert at.closed_loop(9, 4).times.tolist() == [0.0] * 4
    assert at.closed_loop(2, 4).times.tolist() == [0.0] * 2


@pytest.mark.parametrize("text", ["poisson:2", "burst:2:5", "shift:1:2:3", "rollout", "closed:3", "closed:3:1.5"])
def test_forms(text):
    arrivals = at.parse_arrivals(text, synthetic(6), rng())
    assert (np.diff(arrivals.times) >= 0).all()
    assert len(arrivals.times) == (3 if text.startswith("closed") else 6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "steady",
        "poisson",
        "poisson:fast",
        "poisson:0",
        "poisson:-1",
        "poisson:nan",
        "poisson:1:2",
        "burst:1:2.5",
        "burst:1:0",
        "closed:0",
        "closed:1:-1",
        "trace",
    ],
)
def test_wrong_forms_say_what_is_expected(text):
    with pytest.raises(ConfigError, match="expected"):
        at.parse_arrivals(text, synthetic(6), rng())


@pytest.mark.parametrize("router", ["round_robin", "random"])
def test_a_fleet_serves_every_request_once(router):
    trace = synthetic(50)
    case = Case(0, trace, at.poisson(50, 3.0, rng()))
    nodes = spread_over_nodes(case, 7, router, rng())
    assert sum(node.trace.output_tokens for node in nodes) == trace.output_tokens
    assert sorted(np.concatenate([node.arrivals.times for node in nodes])) == sorted(case.arrivals.times)
    assert all((np.diff(node.arrivals.times) >= 0).all() for node in nodes)


def test_a_closed_loop_does_not_spread():
    case = Case(0, synthetic(9), at.closed_loop(9, 3))
    assert spread_over_nodes(case, 1, "random", rng()) == [case]
    with pytest.raises(ConfigError, match="runs on one node only"):
        spread_over_nodes(case, 2, "random", rng())
