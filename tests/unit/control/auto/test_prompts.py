"""Prompts that are read beside decoding take what they take: they make no token worth more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynaspec.contract.costs import PassCosts
from dynaspec.control.auto import AutoController
from dynaspec.control.policies.wrappers import PlainController
from dynaspec.simulate.comparison import Totals
from dynaspec.simulate.costs import CurveCosts
from dynaspec.simulate.simulator import HostConfig, simulate
from dynaspec.simulate.traces import Lengths, closed_loop
from support.closed_loop import COSTS, LIMITS, Loop
from unit.simulate.scenes import production, synthetic

TARGET_MS = ((1, 6.6), (4, 8.0), (8, 10.2), (14, 13.5), (16, 15.2), (32, 29.0), (64, 57.0), (512, 400.0))
DRAFTER_MS = ((1, 0.9), (4, 1.2), (8, 1.6), (16, 2.4), (512, 25.0))
"""Passes of a chat model on two cores: with eight requests no fixed length is as fast as plain decoding."""


def seconds(curve: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    return tuple((rows, ms / 1e3) for rows, ms in curve)


@pytest.mark.parametrize("acceptance", [0.5, 0.7])
def test_beside_prompts_drafts_that_do_not_pay_are_left_out(acceptance: float) -> None:
    lengths = {"prompt": Lengths(200, 0.5), "output": Lengths(80, 0.5)}
    trace = synthetic(256, acceptance, decay=0.95, max_tokens=96, **lengths)
    arrivals = closed_loop(len(trace), 8)
    costs = CurveCosts(PassCosts(target=seconds(TARGET_MS), drafters=(seconds(DRAFTER_MS),)), overhead_s=0.0005)
    auto, plain = (
        Totals(((simulate(trace, arrivals, costs, make, HostConfig(max_num_seqs=8)),),)).tokens_per_second
        for make in (production(policy="auto"), lambda limits: PlainController())
    )
    assert auto > 0.985 * plain


def trained(requests: int) -> tuple[AutoController, Loop]:
    """A controller in the midst of drafting."""
    controller, loop = AutoController(LIMITS, longest=16, costs=COSTS), Loop(requests, 1)
    loop.run(controller, 80)
    assert controller.estimates()["mode"] == "speculate"
    return controller, loop


def test_a_token_is_worth_the_same_beside_a_prompt() -> None:
    controller, loop = trained(4)
    view = loop.view(80, np.ones(4))
    alone = controller.plan(view)
    price, step_s = (controller.estimates()[name] for name in ("token_price_s", "expected_step_s"))
    beside = controller.plan(replace(view, step=81, prefill_tokens=400))
    assert controller.estimates()["token_price_s"] == pytest.approx(price, rel=0.25)  # rows are dearer there
    assert controller.estimates()["expected_step_s"] > 10 * step_s
    assert sum(beside.depth) <= sum(alone.depth)
