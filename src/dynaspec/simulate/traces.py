"""Acceptance traces: how many drafted tokens would be accepted, from any position of any request; and arrivals.

With greedy or seeded decoding the output does not depend on how it was drafted, and whether a drafted token is
accepted depends on its position and the true text before it alone. So one trace serves every policy, and policies
are compared on the very same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import ConfigError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PADDING = 64
"""Entries behind the last position, so that a draft that runs over the end has signals to read."""
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
