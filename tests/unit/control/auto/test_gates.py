"""What ``auto`` promises, closed loop: on machines that nobody has at hand, without the noise of a real one."""

from __future__ import annotations

import numpy as np
import pytest

from support import auto_scenarios as scenarios
from support import copied_text
from support.auto_scenarios import CHEAP, DEAR, HOSTS, MACHINES, auto
from support.drifting_machine import Prices

SEEDS = tuple(range(1, 17))

MISSED = {
    ("tiles of 16", "draft model"): "0.984 of plain decoding",
    ("tiles of 16", "one pass"): "0.984 of plain decoding",
    ("tiles of 16", "whole steps"): "0.984 of plain decoding",
    ("tiles of 24", "draft model"): "0.984 of plain decoding",
    ("tiles of 24", "whole steps"): "0.981 of plain decoding",
}
"""Machines and kinds of host on which a load misses a bound, and what was seen. An entry goes once it holds."""


@pytest.mark.parametrize("prompt", [0, 4000], ids=["short", "4,000 tokens"])
def test_an_adversarial_drafter_costs_little(prompt: int) -> None:
    """Never right, always sure of itself, over 400 steps."""
    assert scenarios.adversary_cost(auto, prompt, (1, 2, 3)) <= 0.03


def test_a_drafter_that_turns_useless_is_dropped_within_thirty_steps_and_taken_up_again_within_300() -> None:
    """Once it is good again; in every seed."""
    dropped, back = scenarios.useless_then_good(auto, SEEDS)
    assert max(dropped) <= 0.5
    assert all(back)


@pytest.mark.parametrize("prices", [DEAR, CHEAP], ids=["dear", "cheap"])
def test_a_machine_whose_speed_drifts(prices: Prices) -> None:
    """Where plain decoding is faster by a tenth, or drafting is; and start-up may have measured rows wrongly."""
    found = {mispriced: scenarios.drifting(auto, prices, mispriced, SEEDS[:8]) for mispriced in (1.0, 0.6, 1.6)}
    assert min(found.values()) >= 0.96, found


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_other_hardware_at_every_load(machine: str, host: str) -> None:
    """Cost curves of a large GPU, a small CPU, tiles; drafters of one pass or with one in every step; whole steps."""
    best, plain = scenarios.at_every_load(auto, machine, host)
    seen = f"{min(best):.3f} of the best fixed length, {min(plain):.3f} of plain decoding"
    assert np.mean(best) >= 0.98, seen
    assert min(best) >= 0.95, seen
    assert min(plain) >= 0.98, seen
    missed, holds = MISSED.get((machine, host)), min(best) >= 0.96 and min(plain) >= 0.985
    if missed is not None:
        assert not holds, "this holds now: take it out of MISSED"
        pytest.xfail(missed)
    assert holds, seen


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("texts", copied_text.TEXTS)
def test_texts_that_copy_parts_of_themselves(texts: str, requests: int) -> None:
    assert scenarios.copying(auto, texts, requests, (1, 2)) >= 0.94


def test_a_gain_of_a_twentieth_at_eight_requests_is_found_from_a_cold_start() -> None:
    """Within 400 steps, in most seeds; see docs/auto.md."""
    lengths = [scenarios.cold_start(auto, seed) for seed in range(1, 9)]
    assert sum(length > 0.3 for length in lengths) >= 7


@pytest.mark.parametrize("quality", [1.0, 0.8])
def test_slow_first_steps_do_not_put_off_drafts_that_pay(quality: float) -> None:
    found = scenarios.slow_first_steps(auto, quality, SEEDS)
    assert np.mean(found) >= 0.92, found


@pytest.mark.parametrize("seed", [1, 2])
def test_load_and_text_that_alternate(seed: int) -> None:
    assert scenarios.alternating(auto, seed) >= 1.05
