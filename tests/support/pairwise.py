"""Covering arrays: few test cases in which every two values of different factors meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Choice = tuple[str, str]
"""(factor, value)"""
Row = dict[str, str]


def covering_array(
    factors: Mapping[str, Sequence[str]], conflict: Callable[[Choice, Choice], bool] = lambda a, b: False
) -> list[Row]:
    """Rows that together contain every pair of values, but those in conflict; greedy, deterministic.

    Each row starts from a pair not covered yet, and takes for every other factor the value that covers most new
    pairs with those already chosen.

    Args:
        factors: values by factor.
        conflict: whether two choices may not stand in one row; symmetric in effect, as both orders are asked.

    Raises:
        ValueError: the values chosen for a row leave none for another factor.
    """
    choices = {name: [(name, value) for value in values] for name, values in factors.items()}

    def clash(a: Choice, b: Choice) -> bool:
        return conflict(a, b) or conflict(b, a)

    missing = dict.fromkeys(
        frozenset((a, b))
        for left, right in combinations(choices.values(), 2)
        for a in left
        for b in right
        if not clash(a, b)
    )
    rows: list[Row] = []
    while missing:
        chosen = sorted(next(iter(missing)))
        for name in sorted(set(factors) - {factor for factor, _ in chosen}):
            fitting = [c for c in choices[name] if not any(clash(c, other) for other in chosen)]
            if not fitting:
                raise ValueError(f"no value of {name} goes with {chosen}; expected one")
            turn = len(rows) % len(fitting)  # ties go to another value in every row
            chosen.append(
                max(
                    fitting[turn:] + fitting[:turn],
                    key=lambda c: sum(frozenset((c, other)) in missing for other in chosen),
                )
            )
        for pair in combinations(chosen, 2):
            missing.pop(frozenset(pair), None)
        rows.append(dict(sorted(chosen)))
    return rows
