"""Elastic speculation: a length from a ladder, by how much of the drafts is accepted.

Thresholds, smoothing and start are those of the proposal vllm-project/vllm pull request 28693; like there, the average
is one over all requests. Its other half, drafter KV writes left out, is in ``kv_gate``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import StepOutcome, StepView

from .planner import MAX_DRAFT_TOKENS

KEY = "draft_length_options"
DEFAULT_LONGEST = 15
"""Whose ladder is 5, 10, 15."""

SMOOTHING = 0.1
START = 0.5
HIGH, MEDIUM, LOW = 0.7, 0.5, 0.3


class Elastic:
    """The longest length above 70 % acceptance, the middle one above 50 %, the second above 30 %, else the shortest.

    Acceptance is an exponential average over steps: of each, all accepted draft tokens over all verified ones. Steps
    without drafts leave it as it is. Tokens behind the end of a request were not judged and do not count.

    Args:
        ladder: lengths as ``parse_ladder`` gives them.
    """

    def __init__(self, ladder: Sequence[int]) -> None:
        self._longest, self._middle = ladder[-1], ladder[len(ladder) // 2]
        self._second, self._shortest = ladder[min(1, len(ladder) - 1)], ladder[0]
        self._acceptance = START

    def length(self, view: StepView) -> int:
        if self._acceptance > HIGH:
            return self._longest
        if self._acceptance > MEDIUM:
            return self._middle
        return self._second if self._acceptance > LOW else self._shortest

    def observe(self, outcome: StepOutcome) -> None:
        columns = zip(outcome.accepted, outcome.verified, outcome.ended, strict=True)
        judged = sum(accepted if ended == "stopped" else verified for accepted, verified, ended in columns)
        if judged:
            self._acceptance += SMOOTHING * (sum(outcome.accepted) / judged - self._acceptance)

    def estimates(self) -> Mapping[str, Any]:
        return {"acceptance": self._acceptance}


def parse_ladder(value: object) -> tuple[int, ...]:
    """The lengths of ``draft_length_options``, checked.

    Raises:
        ConfigError: no list of integers from 1 to 64 that ascend.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise _error(value, "a list of at least one draft length")
    for length in value:
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_DRAFT_TOKENS:
            raise _error(value, f"integers from 1 to {MAX_DRAFT_TOKENS}, but one is {length!r}")
    for before, after in pairwise(value):
        if before >= after:
            raise _error(value, f"lengths that ascend, but {before} comes before {after}")
    return tuple(value)


def ladder_up_to(longest: int) -> tuple[int, ...]:
    """The ladder of a configuration that names none: a third, two thirds and all of ``longest``."""
    return tuple(sorted({max(1, round(longest * part / 3)) for part in (1, 2, 3)}))


def _error(value: object, expected: str) -> ConfigError:
    return ConfigError(f"{KEY} is {value!r}; expected {expected}")
