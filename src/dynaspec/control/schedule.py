"""Draft length by batch size, from a schedule that the user wrote.

Key and meaning are those of vLLM's ``num_speculative_tokens_per_batch_size`` (vllm-project/vllm pull request 32374).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import StepOutcome, StepView

KEY = "num_speculative_tokens_per_batch_size"

Range = tuple[int, int, int]
"""(smallest batch size, largest, k), both sizes included."""


class Schedule:
    """k by the number of decoding requests; a batch size in no range has the k of the range before it.

    Args:
        ranges: as ``parse_schedule`` gives them.
        cap: longest draft.
    """

    def __init__(self, ranges: Sequence[Range], cap: int) -> None:
        self._starts = [low for low, _, _ in ranges]
        self._lengths = [min(k, cap) for _, _, k in ranges]

    def length(self, view: StepView) -> int:
        return self._lengths[bisect_right(self._starts, max(1, len(view.ids))) - 1]

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def estimates(self) -> Mapping[str, Any]:
        return {}


def parse_schedule(value: object) -> tuple[Range, ...]:
    """The ranges of ``num_speculative_tokens_per_batch_size``, checked.

    Raises:
        ConfigError: no list of [low, high, k] of integers, ranges that do not ascend from 1, or that overlap.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise _error(value, "a list of at least one range [low, high, k]")
    for entry in value:
        if not _is_range(entry):
            raise _error(value, f"ranges [low, high, k] of three integers, but one is {entry!r}")
        low, high, k = entry
        if low < 1 or k < 0:
            raise _error(value, f"batch sizes of at least 1 and k of at least 0, but one range is {list(entry)}")
        if low > high:
            raise _error(value, f"low ≤ high in every range, but one is {list(entry)}")
    if value[0][0] != 1:
        raise _error(value, f"a first range that starts at batch size 1, not {value[0][0]}")
    for before, after in pairwise(value):
        if after[0] <= before[1]:
            how = "do not overlap" if after[1] >= before[0] else "ascend"
            raise _error(value, f"ranges that {how}, but {list(before)} comes before {list(after)}")
    return tuple((low, high, k) for low, high, k in value)


def schedule_ranges(ranges: Sequence[Range], cap: int, max_batch: int) -> Iterator[Range]:
    """The schedule as it acts up to ``max_batch``: no gaps, k at most ``cap``, neighbours of equal k joined."""
    starts = [low for low, _, _ in ranges if low <= max_batch]
    ends = [low - 1 for low in starts[1:]] + [max_batch]
    yield from joined((low, high, min(k, cap)) for low, high, (_, _, k) in zip(starts, ends, ranges, strict=False))


def joined(ranges: Iterator[Range]) -> Iterator[Range]:
    """Neighbours of equal k as one range."""
    pending: Range | None = None
    for low, high, k in ranges:
        if pending is not None and pending[2] == k:
            pending = (pending[0], high, k)
            continue
        if pending is not None:
            yield pending
        pending = (low, high, k)
    if pending is not None:
        yield pending


def _is_range(entry: object) -> bool:
    if isinstance(entry, str | bytes) or not isinstance(entry, Sequence) or len(entry) != 3:
        return False
    return all(isinstance(number, int) and not isinstance(number, bool) for number in entry)


def _error(value: object, expected: str) -> ConfigError:
    return ConfigError(f"{KEY} is {value!r}; expected {expected}")
