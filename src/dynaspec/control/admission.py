"""Shares a budget of target rows among drafts."""

from __future__ import annotations

from collections.abc import Sequence


def admit(lengths: Sequence[int], budget: int, first: int = 0) -> tuple[int, ...]:
    """Cuts drafts so that their sum is ≤ ``budget``: all first slots, then all second slots, and so on.

    The last round may not suffice for everyone; it starts at request ``first`` (modulo their number), which
    callers let rotate from step to step so that nobody is always last.

    Causal: where a draft is cut depends on others' lengths, and on its own only as far as the cut.

    Args:
        lengths: tokens in each draft, ≥ 0.
        budget: most tokens over all drafts, ≥ 0.

    Returns:
        The lengths admitted, none above its entry in ``lengths``.
    """
    if sum(lengths) <= budget:
        return tuple(lengths)
    level, left = _full_rounds(lengths, budget)
    admitted = [length if length < level else level for length in lengths]
    if left:
        start = first % len(lengths)
        for request in (*range(start, len(lengths)), *range(start)):
            if lengths[request] > level:
                admitted[request] += 1
                left -= 1
                if left == 0:
                    break
    return tuple(admitted)


def _full_rounds(lengths: Sequence[int], budget: int) -> tuple[int, int]:
    """How many rounds the budget suffices for, and what is left of it for part of the next."""
    ending_at = [0] * (max(lengths) + 1)
    for length in lengths:
        ending_at[length] += 1
    level, left = 0, budget
    alive = len(lengths) - ending_at[0]
    while left >= alive:
        left -= alive
        level += 1
        alive -= ending_at[level]
    return level, left
