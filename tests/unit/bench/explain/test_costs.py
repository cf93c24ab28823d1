from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from dynaspec.bench.explain.costs import StepWork, fit_costs, nonnegative_least_squares, recorded_work
from dynaspec.bench.explain.data import load
from dynaspec.contract.costs import PassCosts

from .logs import DRAFT_ROW_S, KV_S, PASS_S, READ_S, REST_S, ROW_S, STEP_S, Fixed, Host


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), columns=st.integers(1, 5))
def test_nonnegative_least_squares_is_scipys(seed: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(20, columns)), random.normal(size=20)
    assert nonnegative_least_squares(x, y) == pytest.approx(
        nnls(x, y)[0], abs=1e-4
    )  # equals, see below, are that close


def test_of_equal_solutions_the_one_with_fewer_columns():
    x = np.ones((5, 3))
    assert nonnegative_least_squares(x, np.full(5, 2.0)).tolist() == [2.0, 0.0, 0.0]


class Varied(Fixed):
    """Lengths that change every step, which tells all costs apart."""

    def plan(self, view):
        self.length = (view.step * 7) % 9
        return super().plan(view)


def true_price(work: StepWork) -> np.ndarray:
    target = STEP_S + ROW_S * (work.verify_rows + work.prefill_rows) + KV_S * work.kv_tokens + READ_S * work.kv_read
    return target + PASS_S * work.passes + DRAFT_ROW_S * work.draft_rows + REST_S


def imagined(rows: float) -> StepWork:
    one = np.ones(1)
    return StepWork(
        one, one, one * 2, one * 2, verify_rows=one * rows, kv_tokens=one * 300, kv_read=one * 100, prefill_rows=one * 0
    )


@pytest.mark.parametrize(
    "slow", [lambda step: 1.0, lambda step: 40.0 if step % 9 == 0 else 1.0], ids=["even", "hiccups"]
)
def test_known_costs_are_found(tmp_path, slow) -> None:
    data = load(Host(tmp_path / "log", slow=slow).run(Varied(0), 120))
    costs = fit_costs(data)
    assert costs.error < 0.02
    assert costs.plain_steps == 14
    for rows in (1, 5, 20):
        assert costs.price(imagined(rows)) == pytest.approx(true_price(imagined(rows)), rel=0.05)


def test_a_host_that_measures_steps_only(tmp_path) -> None:
    data = load(Host(tmp_path / "log").run(Varied(0), 120))
    for column in (data.steps.draft_s, data.steps.verify_s):
        column[:] = 0.0
    costs = fit_costs(data)
    assert costs.error < 0.03
    assert costs.price(recorded_work(data)).sum() == pytest.approx(data.steps.step_s.sum(), rel=0.03)


def test_a_start_up_profile_says_what_the_log_cannot(tmp_path) -> None:
    """A fixed length at one batch size leaves it open what a smaller pass costs."""
    curve = tuple((rows, STEP_S + ROW_S * rows) for rows in (1, 2, 4, 8, 16, 32))
    header = {"costs": PassCosts(target=curve)}
    without = fit_costs(load(Host(tmp_path / "a").run(Fixed(5), 40)))
    with_profile = fit_costs(load(Host(tmp_path / "b", header=header).run(Fixed(5), 40)))
    assert (without.profiled, with_profile.profiled) == (False, True)
    plain = imagined(1)
    truth = true_price(plain)
    assert with_profile.price(plain) == pytest.approx(truth, rel=0.1)
    assert abs(without.price(plain) / truth - 1) > abs(with_profile.price(plain) / truth - 1)


def test_no_times(tmp_path) -> None:
    assert fit_costs(load(Host(tmp_path / "log", timed=False).run(Fixed(2), 3))) is None
