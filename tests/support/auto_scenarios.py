"""The situations that ``auto`` is judged by, closed loop: deterministic, on machines that nobody has at hand.

Each function takes a way to build a controller and returns one figure; ``tests/unit/control/auto/test_gates.py`` holds
them against what is promised, ``benchmarks/auto_settings.py`` shows how little each setting changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import Controller, Limits, ProposerTraits
from dynaspec.control.auto import AutoController, AutoSettings, CachedPlan
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.policies.lengths import Constant, LengthController
from dynaspec.control.policies.wrappers import PlainController

from . import copied_text
from .closed_loop import LIMITS, SMALL_PAIR, Loop, Machine, fixed_goodput, mean_acceptance, with_traits
from .drifting_machine import DriftingMachine, Prices, speed

Make = Callable[[Limits, PassCosts], Controller]

MODEL = ProposerTraits("draft_model", probe_context=True)
ONE_PASS = ProposerTraits("heads", passes_per_draft="one")
HIDDEN_STATES = ProposerTraits("hidden", passes_per_draft="one", idle_pass=True)
LOADS = (1, 3, 8, 17, 64, 256)


def auto(limits: Limits, costs: PassCosts, settings: AutoSettings | None = None) -> Controller:
    """As hosts get it."""
    return CachedPlan(AutoController(limits, longest=16, costs=costs, settings=settings), limits)


def fixed(k: int) -> Controller:
    return LengthController(Constant(k), ChainPlanner(LIMITS)) if k else PlainController()


# --- a drafter of no use ---------------------------------------------------------------------------------------


def adversary_cost(make: Make, prompt: int, seeds: Sequence[int]) -> float:
    """Share of plain decoding's speed that a drafter costs that is never right and always sure, over 400 steps."""
    ratios = []
    for seed in seeds:
        loop = Loop(1, seed, lambda step, r: 0.0, 0.95, 0.0, with_traits(MODEL), prompt=prompt)
        trace = loop.run(make(loop.limits, SMALL_PAIR.costs()), 400)
        plain = 400 / sum(SMALL_PAIR.pass_s(1) + SMALL_PAIR.host for _ in range(400))
        ratios.append(trace.goodput / plain)
    return 1.0 - float(np.mean(ratios))


def useless_then_good(make: Make, seeds: Sequence[int]) -> tuple[list[float], list[bool]]:
    """A drafter good for 100 steps, useless for 150: mean length 30 steps later, and whether it is back 300 later."""
    useless, back = [], []
    for seed in seeds:
        loop = Loop(1, seed, lambda step, r: float(step < 100 or step >= 250))
        trace = loop.run(make(LIMITS, SMALL_PAIR.costs()), 600)
        useless.append(trace.mean_length(130, 160))
        back.append(trace.mean_length(550, 600) > 1.0)
    return useless, back


# --- machines whose speed drifts ---------------------------------------------------------------------------------

_USERS, _TOKENS, _SECONDS = 4, 16_000, 30.0
DEAR = Prices(rows=((1, 2060e-6), (4, 2240e-6), (8, 3560e-6), (14, 5960e-6), (512, 165e-3)))
"""Rows: plain decoding is faster than two tokens by a tenth."""
CHEAP = Prices(rows=((1, 2060e-6), (4, 2240e-6), (8, 2880e-6), (14, 4440e-6), (512, 160e-3)))
"""Two tokens are faster than plain decoding by as much."""
_ACCEPTANCE = {DEAR: 0.75, CHEAP: 0.85}


@cache
def drifting_fixed(k: int, prices: Prices, seed: int) -> float:
    """Tokens/s of a fixed length."""
    machine = DriftingMachine(prices, seed, _SECONDS)
    return speed(lambda limits: fixed(k), machine, _USERS, _ACCEPTANCE[prices], _TOKENS)


def drifting(make: Make, prices: Prices, mispriced: float, seeds: Sequence[int]) -> float:
    """Speed over that of the better of plain decoding and two tokens, on a machine whose speed drifts.

    Args:
        mispriced: by which start-up multiplies what rows beyond the first take.
    """
    shares = []
    for seed in seeds:
        machine = DriftingMachine(prices, seed, _SECONDS, mispriced)
        found = speed(
            lambda limits, costs=machine.pass_costs(): make(limits, costs),  # type: ignore[misc]
            machine,
            _USERS,
            _ACCEPTANCE[prices],
            _TOKENS,
        )
        shares.append(found / max(drifting_fixed(k, prices, seed) for k in (0, 2)))
    return float(np.mean(shares))


# --- other hardware ----------------------------------------------------------------------------------------------


def stairs(tile: int, most: int = 2048) -> Machine:
    """A pass takes as long as its tiles; the host times the ends of some of them."""
    points, timed = [], []
    for n in range(1, most // tile + 2):
        seconds = 2e-3 * (1 + 0.8 * (n - 1))
        points += [(float(tile * (n - 1) + 1), seconds), (float(tile * n), seconds)]
        if n <= 8 or (n & (n - 1)) == 0:
            timed += [tile * (n - 1) + 1, tile * n]
    return Machine(rows=tuple(points), timed=tuple(timed))


MACHINES = {
    "large GPU, flat to 64 rows": Machine(
        rows=((1, 20e-3), (64, 20.5e-3), (256, 26e-3), (2048, 110e-3)),
        start=0.3e-3,
        draft_pass=1.0e-3,
        draft_row=0.002e-3,
        host=1e-3,
        timed=(1, 8, 32, 64, 128, 256, 512, 1024),
    ),
    "small CPU, linear from row 1": Machine(
        rows=((1, 10e-3), (2048, 10e-3 + 2047 * 2.5e-3)), start=0.2e-3, draft_pass=0.4e-3, draft_row=0.1e-3
    ),
    "tiles of 16": stairs(16),
    "tiles of 24": stairs(24),
    "tiles of 14": stairs(14),
    "small pair on two cores": SMALL_PAIR,
}
HOSTS = {
    "draft model": (with_traits(MODEL), False),
    "one pass": (with_traits(ONE_PASS), False),
    "hidden states, a pass in every step": (with_traits(HIDDEN_STATES), False),
    "whole steps": (replace(with_traits(replace(MODEL, has_confidence=False)), can_stop=False, can_trim=False), True),
}


def on_hardware(
    make: Make, machine: Machine, limits: Limits, whole: bool, requests: int, quality: float, seed: int = 1
) -> tuple[float, float]:
    """Speed over that of the best fixed length, and over plain decoding, after the first 60 of 360 steps."""
    traits, chance = limits.proposers[0], mean_acceptance_of(quality)
    best = max(fixed_goodput(machine, requests, chance, k, traits) for k in range(9))
    plain = fixed_goodput(machine, requests, chance, 0, traits)
    loop = Loop(requests, seed, lambda step, r: quality, noise=0.05, limits=limits, machine=machine, whole=whole)
    trace = loop.run(make(limits, machine.costs()), 360)
    found = trace.goodput_of(60, 360)
    return found / best, found / plain


def at_every_load(make: Make, machine: str, host: str) -> tuple[list[float], list[float]]:
    """``on_hardware`` of each load and two texts, means over seeds: over the best fixed length, over plain decoding."""
    limits, whole = HOSTS[host]
    best, plain = [], []
    for requests in LOADS:
        for quality in (1.0, 0.5):
            seeds = range(1, 9 if requests == 1 else 5 if requests < 10 else 3)
            found = [on_hardware(make, MACHINES[machine], limits, whole, requests, quality, seed) for seed in seeds]
            against_best, against_plain = np.mean(found, axis=0).tolist()
            best.append(against_best)
            plain.append(against_plain)
    return best, plain


@cache
def mean_acceptance_of(quality: float) -> float:
    return mean_acceptance(quality)


# --- texts that copy ---------------------------------------------------------------------------------------------


def copying(make: Make, texts: str, requests: int, seeds: Sequence[int]) -> float:
    """Mean speed over that of the best fixed mix of a model's drafts and lookups, chosen with these texts known."""
    kind = copied_text.TEXTS[texts]
    found = [copied_text.goodput(make(copied_text.BOTH, copied_text.COSTS), kind, requests, seed) for seed in seeds]
    best = max(
        np.mean([copied_text.mixed_goodput(mix, kind, requests, seed) for seed in seeds]) for mix in copied_text.MIXES
    )
    return float(np.mean(found) / best)


# --- loads that begin and change ---------------------------------------------------------------------------------


def cold_start(make: Make, seed: int) -> float:
    """Eight requests, two tokens each 5 % faster than plain decoding: mean length over steps 400 to 500."""
    chance = mean_acceptance_of(0.9)
    rows = ((1.0, 2.0e-3), (8.0, 2.3e-3), (16.0, 3.05e-3), (24.0, 3.72e-3), (64.0, 8.2e-3), (512.0, 58e-3))
    machine = Machine(rows=rows, timed=(1, 8, 16, 24, 64))
    plain, two = (fixed_goodput(machine, 8, chance, k, MODEL) for k in (0, 2))
    assert 1.04 < two / plain < 1.06, two / plain
    limits = replace(with_traits(replace(MODEL, has_confidence=False)), can_stop=False)
    loop = Loop(8, seed, lambda step, r: 0.9, limits=limits, machine=machine)
    return loop.run(make(limits, machine.costs()), 500).mean_length(400, 500)


def slow_first_steps(make: Make, quality: float, seeds: Sequence[int]) -> list[float]:
    """One request; the first four steps take twice as long as what was timed at start-up: as caches are cold, or the
    machine is slow for a moment. Speed over that of the best fixed length, over the first 100 steps, for each seed."""
    limits, chance = with_traits(MODEL), mean_acceptance_of(quality)
    best = max(fixed_goodput(SMALL_PAIR, 1, chance, k, MODEL) for k in range(9))
    found = []
    for seed in seeds:
        loop = Loop(1, seed, lambda step, r: quality, limits=limits, slowness=lambda step: 2.0 if step < 4 else 1.0)
        found.append(loop.run(make(limits, SMALL_PAIR.costs()), 100).goodput / best)
    return found


PHASES, PHASE = 12, 200


def _requests(step: int) -> int:
    return 32 if (step // (2 * PHASE)) % 2 else 1


def _quality(step: int, request: int) -> float:
    return 0.3 if (step // PHASE) % 2 else 1.0


def alternating(make: Make, seed: int) -> float:
    """Speed over that of the best fixed length where load and text alternate every 200 steps.

    Speed is that over plain decoding, averaged over phases: as if each had as much to do.
    """
    loop = Loop(_requests, seed, _quality, machine=SMALL_PAIR)
    return _speed_up(make(LIMITS, SMALL_PAIR.costs()), loop) / max(_fixed_alternating(k, seed) for k in range(6))


@cache
def _fixed_alternating(k: int, seed: int) -> float:
    return _speed_up(fixed(k), Loop(_requests, seed, _quality, machine=SMALL_PAIR))


def _speed_up(controller: Controller, loop: Loop) -> float:
    trace = loop.run(controller, PHASES * PHASE)
    ratios = []
    for first in range(0, PHASES * PHASE, PHASE):
        plain = fixed_goodput(SMALL_PAIR, _requests(first), 0.5, 0, MODEL)
        ratios.append(trace.goodput_of(first, first + PHASE) / plain)
    return float(np.mean(ratios))
