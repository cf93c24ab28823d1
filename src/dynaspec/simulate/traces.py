"""Acceptance traces: how many drafted tokens would be accepted, from any position of any request; arrivals; and
synthetic traces, with acceptance from a Beta distribution and confidences that tell of it as much as asked.

With greedy or seeded decoding the output does not depend on how it was drafted, and whether a drafted token is
accepted depends on its position and the true text before it alone. So one trace serves every policy, and policies
are compared on the very same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import ConfigError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PADDING = 64
"""Entries behind the last position, so that a draft that runs over the end has signals to read."""
_EDGE = 1e-4
"""Request rates are kept this far from 0 and 1, where a logit ends."""
FORMS = (
    "poisson:RATE, burst:RATE:SIZE, shift:RATE:RATE[:…], rollout, closed:USERS[:THINK_SECONDS] or trace"
    " (rates in requests a second)"
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. *Position* t of a request: t of its output tokens are there.

    All positions of all requests lie one behind the other: request i's from ``first[i]`` on, ``output[i]`` of them.
    """

    prompt: Ints
    """[N] prompt tokens."""
    output: Ints
    """[N] output tokens after which the request ends by itself, ≥ 1."""
    max_tokens: Ints
    """[N] most output tokens that its caller allows, ≥ ``output``; all that a policy may know of its length."""
    first: Ints
    """[N]"""
    runs: Ints
    """[P] drafted tokens that are accepted if drafting starts at this position; never beyond the request's end."""
    confidence: Floats | None = None
    """[P + padding] the drafter's confidence in its token for this position, given the true text before it."""
    stray: Floats | None = None
    """[P + padding] its confidence there once it has left the true text."""
    arrival_s: Floats | None = None
    """[N] non-decreasing, where they were recorded."""

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def output_tokens(self) -> int:
        return int(self.output.sum())

    def survival(self, longest: int) -> Floats:
        """[longest] share of positions from which at least 1, 2, … drafted tokens are accepted.

        Positions too close to the end for a draft of that length do not count; where none is left, the rate before
        stays.
        """
        left = np.repeat(self.output, self.output) - (np.arange(len(self.runs)) - np.repeat(self.first, self.output))
        rates, rate = np.zeros(longest), 1.0
        for j in range(1, longest + 1):
            reach = left >= j
            rate = min(rate, float((self.runs[reach] >= j).mean())) if reach.any() else rate
            rates[j - 1] = rate
        return rates

    def take(self, requests: Ints) -> Self:
        """The trace of some of the requests, in this order."""
        output = self.output[requests]
        at = np.repeat(self.first[requests], output) + _within(output)
        columns: dict[str, Any] = {
            name: None if column is None else column[requests]
            for name, column in (
                ("prompt", self.prompt),
                ("max_tokens", self.max_tokens),
                ("arrival_s", self.arrival_s),
            )
        }
        signals: dict[str, Any] = {
            name: None if column is None else np.concatenate([column[at], column[-PADDING:]])
            for name, column in (("confidence", self.confidence), ("stray", self.stray))
        }
        return replace(self, output=output, first=np.cumsum(output) - output, runs=self.runs[at], **columns, **signals)


def build_trace(
    prompt: Ints,
    output: Ints,
    runs: Ints,
    *,
    max_tokens: Ints | None = None,
    confidence: Floats | None = None,
    stray: Floats | None = None,
    arrival_s: Floats | None = None,
) -> Trace:
    """Lays out and checks a trace; signals are given without padding.

    Raises:
        ConfigError: columns that do not fit together.
    """
    prompt, output, runs = (np.asarray(column, dtype=np.int64) for column in (prompt, output, runs))
    if not len(prompt):
        raise ConfigError("the trace has no requests; expected at least one")
    if len(prompt) != len(output) or prompt.min() < 1 or output.min() < 1:
        raise ConfigError("a trace's requests need at least one prompt token and one output token each")
    if len(runs) != output.sum():
        raise ConfigError(f"the trace has {len(runs)} runs for {output.sum()} output tokens; expected one a token")
    limit = output if max_tokens is None else np.asarray(max_tokens, dtype=np.int64)
    if (limit < output).any():
        raise ConfigError("a request of the trace is longer than its max_tokens; expected max_tokens ≥ output tokens")
    left = np.repeat(output, output) - _within(output)
    if runs.min() < 0 or (runs > left).any():
        raise ConfigError("a run of the trace is negative or goes beyond its request's end")
    if confidence is not None and stray is None:
        stray = confidence
    return Trace(
        prompt=prompt,
        output=output,
        max_tokens=limit,
        first=np.cumsum(output) - output,
        runs=runs,
        confidence=_padded(confidence, len(runs)),
        stray=_padded(stray if confidence is not None else None, len(runs)),
        arrival_s=arrival_s,
    )


def runs_of(accepted: npt.NDArray[np.bool_], output: Ints) -> Ints:
    """Run lengths where acceptance depends on the position alone, as with a drafter that is a language model.

    Args:
        accepted: [P] whether the drafter's token for each position is accepted.
        output: [N] positions of each request.
    """
    positions = np.arange(len(accepted))
    ends = np.repeat(np.cumsum(output), output)
    miss = np.where(accepted, ends, positions)
    # The nearest miss at or behind each position; misses of later requests lie behind this one's end.
    nearest: Ints = np.minimum.accumulate(miss[::-1])[::-1]
    return np.minimum(nearest, ends) - positions


def runs_by_reach(reach: Ints, output: Ints) -> Ints:
    """Run lengths where the token for a position is accepted in the slots 1 … ``reach`` of a draft only.

    Args:
        reach: [P] the deepest slot in which it is accepted; 0 = in none.
        output: [N] positions of each request.
    """
    left = np.repeat(output, output) - _within(output)
    padded = np.concatenate([reach, np.zeros(PADDING, dtype=np.int64)])
    runs = np.zeros(len(reach), dtype=np.int64)
    alive = np.arange(len(reach))
    for slot in range(1, PADDING + 1):
        alive = alive[(padded[alive + slot - 1] >= slot) & (left[alive] >= slot)]
        if not alive.size:
            break
        runs[alive] = slot
    return runs


def _within(lengths: Ints) -> Ints:
    """[0 … n₁ − 1, 0 … n₂ − 1, …]"""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _padded(signal: Floats | None, size: int) -> Floats | None:
    if signal is None:
        return None
    values = np.asarray(signal, dtype=np.float64)
    if len(values) != size or not ((values >= 0.0) & (values <= 1.0)).all():
        raise ConfigError(f"the trace has {len(values)} confidences for {size} runs; expected one a run, from 0 to 1")
    return np.concatenate([values, np.resize(values, PADDING)])


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Times for the requests of a trace, in its order."""

    times: Floats
    """[n] non-decreasing seconds. Requests behind the first n arrive when another has ended."""
    think_s: float = 0.0
    """What passes between an end and the arrival that it sets off."""

    def take(self, requests: Ints) -> Arrivals:
        """The arrivals of some of the requests; for times known beforehand only."""
        return Arrivals(self.times[requests], self.think_s)


def poisson(count: int, rate: float, rng: np.random.Generator) -> Arrivals:
    """Independent arrivals, ``rate`` a second."""
    return Arrivals(np.cumsum(rng.exponential(1 / _rate(rate), count)))


def bursts(count: int, rate: float, size: int, rng: np.random.Generator) -> Arrivals:
    """Groups of ``size`` that arrive together, as a Poisson process; ``rate`` requests a second in all."""
    if size < 1:
        raise ConfigError(f"a burst size is {size}; expected at least 1")
    groups = np.cumsum(rng.exponential(size / _rate(rate), -(-count // size)))
    return Arrivals(np.repeat(groups, size)[:count])


def shift(count: int, rates: Sequence[float], rng: np.random.Generator) -> Arrivals:
    """Poisson arrivals whose rate changes: equal shares of the requests come at each of the rates."""
    phase = np.arange(count) * len(rates) // count
    mean = np.array([1 / _rate(rate) for rate in rates])[phase]
    return Arrivals(np.cumsum(rng.exponential(1.0, count) * mean))


def rollout(count: int) -> Arrivals:
    """All at once, as a reinforcement-learning step generates: long-tailed lengths leave few running in the end."""
    return Arrivals(np.zeros(count))


def closed_loop(count: int, users: int, think_s: float = 0.0) -> Arrivals:
    """``users`` who each send their next request ``think_s`` after their last one has ended."""
    if users < 1:
        raise ConfigError(f"users is {users}; expected at least 1")
    if not 0.0 <= think_s < math.inf:
        raise ConfigError(f"the think time is {think_s}; expected seconds of at least 0")
    return Arrivals(np.zeros(min(users, count)), think_s)


def parse_arrivals(text: str, trace: Trace, rng: np.random.Generator) -> Arrivals:
    """Arrivals from a short form, see ``FORMS``.

    Raises:
        ConfigError: another form, or values out of range.
    """
    kind, *values = text.split(":")
    counts, build = _KINDS.get(kind, (range(0), _of_trace))
    if len(values) not in counts:
        raise ConfigError(f"the arrivals are {text!r}; expected {FORMS}")
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        raise ConfigError(f"the arrivals are {text!r}; expected numbers in {FORMS}") from None
    return build(numbers, trace, rng)


def _of_trace(_: list[float], trace: Trace, rng: np.random.Generator) -> Arrivals:
    if trace.arrival_s is None:
        raise ConfigError("the arrivals are 'trace', but the trace has no arrival times; expected another form")
    return Arrivals(trace.arrival_s - trace.arrival_s[0])


_KINDS: Mapping[str, tuple[range, Callable[[list[float], Trace, np.random.Generator], Arrivals]]] = {
    "poisson": (range(1, 2), lambda v, trace, rng: poisson(len(trace), v[0], rng)),
    "burst": (range(2, 3), lambda v, trace, rng: bursts(len(trace), v[0], _whole(v[1]), rng)),
    "shift": (range(2, 17), lambda v, trace, rng: shift(len(trace), v, rng)),
    "rollout": (range(1), lambda v, trace, rng: rollout(len(trace))),
    "closed": (range(1, 3), lambda v, trace, rng: closed_loop(len(trace), _whole(v[0]), *v[1:])),
    "trace": (range(1), _of_trace),
}
"""How many numbers each form has, and what it makes of them."""


def _rate(rate: float) -> float:
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"an arrival rate is {rate:g}; expected requests a second, above 0")
    return rate


def _whole(value: float) -> int:
    if not value.is_integer():
        raise ConfigError(f"a number of requests is {value:g}; expected an integer")
    return int(value)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal token counts, rounded, at least 1.

    Raises:
        ConfigError: a mean below 1 or a negative spread.
    """

    mean: float
    spread: float = 0.0
    """Standard deviation of the logarithm; 0 = all alike, about 1 = the long tail of RL rollouts."""
    longest: int | None = None
    """Cut here."""

    def __post_init__(self) -> None:
        if not self.mean >= 1 or not math.isfinite(self.mean):
            raise ConfigError(f"a mean length is {self.mean}; expected at least 1 token")
        if not 0.0 <= self.spread <= 4.0:
            raise ConfigError(f"a length spread is {self.spread}; expected a number from 0 to 4")

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        # The mean of a lognormal is exp(μ + σ²/2).
        values = rng.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(np.rint(values), 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """How a synthetic trace is drawn.

    Each request has a conditional acceptance a ~ Beta(m·c, (1 − m)·c), each of its tokens is accepted with chance a,
    independent of the others. The drafter's confidence is c = σ(logit a + d·x), with x ~ N(±d/2, 1) for tokens that
    are accepted or not: by Bayes' rule exactly the chance of acceptance given x (the equal-variance binormal model of
    signal detection), so the confidence is calibrated, and d sets how well it tells the two apart.

    Raises:
        ConfigError: a value out of range.
    """

    requests: int
    acceptance: tuple[float, ...] = (0.7,)
    """m of each phase; the requests fall into phases of equal size, in the order of arrival."""
    concentration: float = 12.0
    """c: how alike the requests are; large = all have the mean."""
    decay: float = 1.0
    """Conditional acceptance of slot j is a·decay^(j − 1): 1 for a language model, below 1 for parallel heads."""
    auc: float = 0.8
    """Chance, within a request, that an accepted token has more confidence than a rejected one; 0.5 = no signal."""
    noise: float = 0.0
    """Standard deviation of noise in the confidence's logit. The AUC stays, calibration suffers."""
    prompt: Lengths = Lengths(512, 0.5)
    output: Lengths = Lengths(256, 0.5)
    max_tokens: int | None = None
    """What callers allow; None: the longest output of the trace."""

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"requests is {self.requests}; expected at least 1")
        for mean in self.acceptance:
            if not 0.0 <= mean <= 1.0:
                raise ConfigError(f"acceptance is {mean}; expected a number from 0 to 1")
        if not 0 < len(self.acceptance) <= self.requests:
            raise ConfigError(f"acceptance has {len(self.acceptance)} phases for {self.requests} requests")
        for name, value, low, high in (
            ("concentration", self.concentration, 0.1, 1e6),
            ("decay", self.decay, 0.01, 1.0),
            ("auc", self.auc, 0.5, 0.999),
            ("noise", self.noise, 0.0, 10.0),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}; expected a number from {low} to {high:g}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; expected at least 1")

    def draw(self, rng: np.random.Generator) -> Trace:
        """A trace; the same generator state gives the same trace."""
        prompt = self.prompt.draw(self.requests, rng)
        output = self.output.draw(self.requests, rng)
        if self.max_tokens is not None:
            output = np.minimum(output, self.max_tokens)
        rate = np.repeat(self._rates(rng), output)
        accepted, reach = self._fates(rate, rng)
        runs = runs_of(accepted, output) if self.decay == 1.0 else runs_by_reach(reach, output)
        strays, _ = self._fates(rate, rng)
        return build_trace(
            prompt,
            output,
            runs,
            max_tokens=np.full(self.requests, self.max_tokens or int(output.max())),
            confidence=self._confidence(rate, accepted, rng),
            stray=self._confidence(rate, strays, rng),
        )

    def _rates(self, rng: np.random.Generator) -> Floats:
        """[N] each request's conditional acceptance."""
        phase = np.arange(self.requests) * len(self.acceptance) // self.requests
        mean = np.array(self.acceptance)[phase]
        inner = np.clip(mean, _EDGE, 1 - _EDGE)
        drawn = rng.beta(inner * self.concentration, (1 - inner) * self.concentration)
        # A phase of 0 or 1 means just that, for closed-form checks and adversaries.
        return np.where((mean == 0.0) | (mean == 1.0), mean, drawn)

    def _fates(self, rate: Floats, rng: np.random.Generator) -> tuple[npt.NDArray[np.bool_], Ints]:
        """For each position whether its token is accepted in slot 1, and the deepest slot in which it is."""
        u = rng.random(len(rate))
        accepted = u < rate
        if self.decay == 1.0:
            return accepted, np.where(accepted, PADDING, 0)
        with np.errstate(divide="ignore"):
            deepest = np.floor(np.log(u / np.maximum(rate, 1e-300)) / math.log(self.decay)) + 1
        return accepted, np.where(accepted, np.clip(deepest, 1, PADDING), 0).astype(np.int64)

    def _confidence(self, rate: Floats, accepted: npt.NDArray[np.bool_], rng: np.random.Generator) -> Floats:
        inner = np.clip(rate, _EDGE, 1 - _EDGE)
        d = separation(self.auc, self.noise)
        x = np.where(accepted, d / 2, -d / 2) + rng.standard_normal(len(rate))
        logit = np.log(inner / (1 - inner)) + d * x + self.noise * rng.standard_normal(len(rate))
        result: Floats = 1.0 / (1.0 + np.exp(-logit))
        return result


def separation(auc: float, noise: float) -> float:
    """d for which d·x + noise·ε has this AUC, with x ~ N(±d/2, 1): AUC = Φ(d² / √(2(d² + noise²)))."""
    q = NormalDist().inv_cdf(auc) * math.sqrt(2)
    return math.sqrt((q**2 + q * math.sqrt(q**2 + 4 * noise**2)) / 2)
