from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynaspec.bench.explain.costs import StepWork, fit_costs, recorded_work
from dynaspec.bench.explain.data import load
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Limits, ProposerTraits

from .logs import DRAFT_ROW_S, KV_S, PASS_S, READ_S, REST_S, ROW_S, STEP_S, Fixed, Host


class Varied(Fixed):
    """Lengths that change every step, which tells all costs apart."""

    def plan(self, view):
        self.length = (view.step * 7) % 9
        return super().plan(view)


def true_price(work: StepWork) -> np.ndarray:
    target = STEP_S + ROW_S * (work.verify_rows + work.prefill_rows) + KV_S * work.kv_tokens + READ_S * work.kv_read
    return target + PASS_S * work.passes + DRAFT_ROW_S * (work.drawn + work.read_in) + REST_S


def imagined(rows: int) -> StepWork:
    """One request with a draft; plain decoding if there is no other row."""
    k = rows - 1
    columns = (rows, 0, 100, 100 * rows, min(k, 1), k, k, 0)
    return StepWork(*(np.full(1, float(value)) for value in columns))


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


def test_beside_a_model_lookups_are_not_what_is_priced(tmp_path) -> None:
    """However much more they draft."""
    lookup = ProposerTraits("ngram", passes_per_draft="none")
    limits = Limits(tuple(range(9)), proposers=(lookup, ProposerTraits("draft_model")))
    data = load(Host(tmp_path / "log", limits=replace(limits, proposers=limits.proposers[1:])).run(Varied(0), 60))
    found = np.where(data.rows.drafted < 8, 0, 1)
    data = replace(data, limits=limits, rows=replace(data.rows, proposer=found))
    costs = fit_costs(data)
    assert costs.drafter == 1
    assert recorded_work(data).drawn.sum() == data.rows.drafted[found == 1].sum()


def test_no_times(tmp_path) -> None:
    assert fit_costs(load(Host(tmp_path / "log", timed=False).run(Fixed(2), 3))) is None
