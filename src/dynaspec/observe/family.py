"""A metric family: name, type, labels, meaning, and how its values come from what was counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from .histogram import HistogramCounts

S = TypeVar("S")
Values = Sequence[tuple[tuple[str, ...], float]]
"""Values of a family's labels, and what was counted for them."""


@dataclass(frozen=True, slots=True)
class NumberFamily(Generic[S]):
    """Counters or gauges, read off a source of type ``S``.

    Args:
        name: without namespace; a counter's ends in ``_total``.
        labels: beside those that all families have.
    """

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: tuple[str, ...]
    values: Callable[[S], Values]


@dataclass(frozen=True, slots=True)
class HistogramFamily(Generic[S]):
    """A histogram, read off a source of type ``S``."""

    name: str
    meaning: str
    value: Callable[[S], HistogramCounts]


Family: TypeAlias = NumberFamily[S] | HistogramFamily[S]


def counter(name: str, meaning: str, value: Callable[[S], float]) -> NumberFamily[S]:
    return NumberFamily(name, "counter", meaning, (), lambda source: [((), value(source))])


def gauge(name: str, meaning: str, value: Callable[[S], float | None]) -> NumberFamily[S]:
    """Says nothing where the value is None."""

    def values(source: S) -> Values:
        found = value(source)
        return [] if found is None else [((), found)]

    return NumberFamily(name, "gauge", meaning, (), values)


def counters(name: str, label: str, meaning: str, values: Callable[[S], Mapping[str, float]]) -> NumberFamily[S]:
    """One for each value of a label."""
    return NumberFamily(name, "counter", meaning, (label,), lambda source: _one_label(values(source)))


def gauges(name: str, label: str, meaning: str, values: Callable[[S], Mapping[str, float]]) -> NumberFamily[S]:
    """One for each value of a label."""
    return NumberFamily(name, "gauge", meaning, (label,), lambda source: _one_label(values(source)))


def _one_label(values: Mapping[str, float]) -> Values:
    return [((key,), value) for key, value in values.items()]
