"""Medians of noisy ratios, with bounds, and a choice that is not judged by the rounds that made it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import numpy as np

from dynaspec.contract.errors import ConfigError

_DRAWS = 4000


def shuffled(sides: Sequence[str], turn: int) -> list[str]:
    """The order of a round: another one each time, the same in every run.

    A side that always follows the same other one is measured in what that leaves behind: always right after the longest
    drafts, ``auto`` decoded plainly 4 % slower than plain decoding at 16 requests; in shuffled rounds as fast.
    """
    return [sides[i] for i in np.random.default_rng(turn).permutation(len(sides))]


def lower_bound(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> float:
    """One-sided lower confidence bound of the median: a percentile bootstrap (Efron, 1979).

    Raises:
        ConfigError: no values.
    """
    if not values:
        raise ConfigError("there are no values; expected at least one to take a bound of")
    drawn = np.random.default_rng(seed).choice(np.asarray(values, dtype=np.float64), (_DRAWS, len(values)))
    # "lower": a bound between two values would claim more than was seen.
    return float(np.quantile(np.median(drawn, axis=1), 1.0 - level, method="lower"))


def odd_rounds(rounds: Sequence[float]) -> list[float]:
    """Rounds 1, 3, 5, …, counted from 1."""
    return list(rounds[::2])


def even_rounds(rounds: Sequence[float]) -> list[float]:
    """Rounds 2, 4, 6, …"""
    return list(rounds[1::2])


def best_on_odd_rounds(rates: Mapping[str, Sequence[float]]) -> str:
    """The side with the largest median on odd rounds, of those that took part in all. Compare it on even ones: the
    winner of a noisy contest was also lucky, and its luck must not count.

    Args:
        rates: side → one figure a round, at least one.
    """
    rounds = max(map(len, rates.values()))
    rivals = [side for side, of_side in rates.items() if len(of_side) == rounds]
    return max(rivals, key=lambda side: median(odd_rounds(rates[side])))


def in_the_running(rates: Mapping[str, Sequence[float]], least: float, *, always: Collection[str]) -> list[str]:
    """The sides that may still be the best, and those that are measured ``always``.

    A rival must not sit out by bad luck, so it has to be behind for certain: by the 95 % bound of the median.

    Args:
        rates: side → one figure a round.
        least: share of the best side's figures that the others may have.
    """
    best = rates[max(rates, key=lambda side: median(rates[side]))]
    return [
        side for side, of_side in rates.items() if side in always or lower_bound(ratios(best, of_side)) <= 1.0 / least
    ]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round: what slows the machine for a while slows both sides of a round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
