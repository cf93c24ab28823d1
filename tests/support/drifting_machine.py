"""A machine for the simulator whose speed drifts and jumps, and whose caches are cold after a change of mode."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynaspec.contract.costs import PassCosts
from dynaspec.simulate.costs import StepLoad, StepTime
from dynaspec.simulate.simulator import ControllerFactory, HostConfig, simulate
from dynaspec.simulate.traces import Lengths, Synthetic, closed_loop

_TICK_S = 1e-3
_SETTLED = 6
"""Steps of plain decoding after which nothing is left of a draft in the caches."""
_SIZES = (1, 4, 8, 14, 16, 28, 32, 64)
"""Rows that are measured at start-up."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds."""

    rows: tuple[tuple[int, float], ...]
    """What a target pass takes by its rows, at points between which it is linear."""
    draft: float = 300e-6
    draft_pass: float = 200e-6
    draft_row: float = 25e-6
    host: tuple[float, float] = (250e-6, 350e-6)
    """Of a step without drafts, and with."""
    kv_entry: float = 0.4e-6

    def pass_s(self, rows: int) -> float:
        return float(np.interp(rows, *zip(*self.rows, strict=True)))


class DriftingMachine:
    """A cost model of the simulator.

    Args:
        seconds: for which its speed is known beforehand; it is the same for all machines with that seed.
        mispriced: by which start-up multiplies what rows beyond the first take.
    """

    name = "drifting"
    kv_tokens: int | None = None

    def __init__(self, prices: Prices, seed: int, seconds: float, mispriced: float = 1.0) -> None:
        self._prices = prices
        self._mispriced = mispriced
        self._rng = np.random.default_rng(seed + 1)
        self._slowness = _slowness(np.random.default_rng(seed), round(seconds / _TICK_S))
        self._now = 0.0
        self._drafts, self._since = False, _SETTLED

    def time(self, load: StepLoad) -> StepTime:
        if not load.requests:
            return StepTime(0.0, 1e-6)  # the prompts are cached
        work, prices = load.work, self._prices
        drafts = bool(work.rows_per_pass)
        self._since = self._since + 1 if drafts == self._drafts else 0
        self._drafts = drafts
        verify_s = prices.pass_s(work.verify_rows) + prices.kv_entry * work.kv_tokens
        draft_s = 0.0
        if drafts:
            rows = sum(work.rows_per_pass)
            draft_s = prices.draft + prices.draft_pass * len(work.rows_per_pass) + prices.draft_row * rows
            draft_s *= (2.0, 1.3, 1.0)[min(self._since, 2)]
            verify_s += 60e-6
        else:
            verify_s += 0.2 * prices.pass_s(1) * max(0, _SETTLED - self._since) / _SETTLED
        factors = np.exp(0.05 * self._rng.standard_normal(3))
        factors *= self._slowness[min(int(self._now / _TICK_S), self._slowness.size - 1)]
        if self._rng.random() < 0.02:
            factors *= 1.0 + self._rng.exponential(0.5)
        time = StepTime(draft_s * factors[0], verify_s * factors[1], prices.host[drafts] * factors[2])
        self._now += time.step_s
        return time

    def pass_costs(self) -> PassCosts:
        prices, one = self._prices, self._prices.pass_s(1)
        target = tuple((n, 2e-4 + one + (prices.pass_s(n) - one) * (self._mispriced if n > 1 else 1.0)) for n in _SIZES)
        drafter = tuple((n, prices.draft_pass + prices.draft_row * n) for n in (1, 4, 16))
        return PassCosts(target, (drafter,), first_s=(prices.draft,), context_s=prices.kv_entry)


def speed(make: ControllerFactory, machine: DriftingMachine, users: int, acceptance: float, tokens: int) -> float:
    """Tokens/s of a closed loop over texts that the drafter is right about as often as that."""
    texts = Synthetic(
        requests=tokens // 64,
        acceptance=(acceptance,),
        concentration=4.0,
        auc=0.87,
        prompt=Lengths(2),
        output=Lengths(64, 0.3),
        max_tokens=128,
    ).draw(np.random.default_rng(7))
    run = simulate(texts, closed_loop(len(texts), users), machine, make, HostConfig())
    return float(run.output.sum()) / run.seconds


def _slowness(rng: np.random.Generator, ticks: int) -> npt.NDArray[np.float64]:
    """What everything takes, over what it usually takes: fast and slow drifts, and stretches of a slower machine."""
    slower, at, busy = np.zeros(ticks), 0, False
    while at < ticks:
        stretch = round(rng.exponential(4.0 if busy else 8.0) / _TICK_S) + 1
        slower[at : at + stretch] = 0.3 * busy
        at, busy = at + stretch, not busy
    return np.exp(_drift(rng, ticks, 0.3, 0.04) + _drift(rng, ticks, 5.0, 0.08) + slower)


def _drift(rng: np.random.Generator, ticks: int, seconds: float, deviation: float) -> npt.NDArray[np.float64]:
    """An Ornstein-Uhlenbeck process with that correlation time and standard deviation."""
    keep = math.exp(-_TICK_S / seconds)
    values, value = np.empty(ticks), deviation * rng.standard_normal()
    for i, noise in enumerate(rng.standard_normal(ticks) * deviation * math.sqrt(1.0 - keep * keep)):
        value = keep * value + noise
        values[i] = value
    return values
