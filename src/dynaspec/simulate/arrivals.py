"""When requests arrive."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.errors import ConfigError

from .traces import Floats, Ints, Trace

FORMS = (
    "poisson:RATE, burst:RATE:SIZE, shift:RATE:RATE[:…], rollout, closed:USERS[:THINK_SECONDS] or trace"
    " (rates in requests a second)"
)


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
    if kind not in _KINDS or len(values) not in _KINDS[kind].values:
        raise ConfigError(f"the arrivals are {text!r}; expected {FORMS}")
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        raise ConfigError(f"the arrivals are {text!r}; expected numbers in {FORMS}") from None
    return _KINDS[kind].build(numbers, trace, rng)


@dataclass(frozen=True, slots=True)
class _Kind:
    values: range
    build: Callable[[list[float], Trace, np.random.Generator], Arrivals]


def _of_trace(_: list[float], trace: Trace, rng: np.random.Generator) -> Arrivals:
    if trace.arrival_s is None:
        raise ConfigError("the arrivals are 'trace', but the trace has no arrival times; expected another form")
    return Arrivals(trace.arrival_s - trace.arrival_s[0])


_KINDS: Mapping[str, _Kind] = {
    "poisson": _Kind(range(1, 2), lambda v, trace, rng: poisson(len(trace), v[0], rng)),
    "burst": _Kind(range(2, 3), lambda v, trace, rng: bursts(len(trace), v[0], _whole(v[1]), rng)),
    "shift": _Kind(range(2, 17), lambda v, trace, rng: shift(len(trace), v, rng)),
    "rollout": _Kind(range(1), lambda v, trace, rng: rollout(len(trace))),
    "closed": _Kind(range(1, 3), lambda v, trace, rng: closed_loop(len(trace), _whole(v[0]), *v[1:])),
    "trace": _Kind(range(1), _of_trace),
}


def _rate(rate: float) -> float:
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"an arrival rate is {rate:g}; expected requests a second, above 0")
    return rate


def _whole(value: float) -> int:
    if not value.is_integer():
        raise ConfigError(f"a number of requests is {value:g}; expected an integer")
    return int(value)
