"""Policies that choose a draft length: constant, by batch size, elastic, heuristic; and what carries them out.

``constant`` is Leviathan et al. (2211.17192). ``schedule`` has the key and meaning of vLLM's
``num_speculative_tokens_per_batch_size`` (vllm-project/vllm pull request 32374). ``elastic`` has thresholds, smoothing
and start of vllm-project/vllm pull request 28693, and like there one average over all requests; its other half, drafter
KV writes left out, is ``wrappers.KvGate``. ``heuristic`` is Transformers' assisted generation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import DraftView, Ended, SpecPlan, StepOutcome, StepView, TreeRule
from dynaspec.control.planner import MAX_DRAFT_TOKENS, ChainPlanner

from .confidence import ConfidenceStop

GROWTH = 2
SHRINKAGE = 1
RANGES_KEY = "num_speculative_tokens_per_batch_size"
Range = tuple[int, int, int]
"""(smallest batch size, largest, k), both sizes included."""
LADDER_KEY = "draft_length_options"
DEFAULT_LONGEST = 15
"""Whose ladder is 5, 10, 15."""
ELASTIC_SMOOTHING = 0.1
ELASTIC_START = 0.5
HIGH, MEDIUM, LOW = 0.7, 0.5, 0.3


class LengthPolicy(Protocol):
    """How many tokens to draft, from nothing but the view and what was observed before."""

    def length(self, view: StepView) -> int:
        """The draft length of this step, the same for every request; ≥ 0."""
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learns from a step; may come late."""
        ...

    def estimates(self) -> Mapping[str, Any]:
        """What the lengths rest on, as plain JSON values."""
        ...


class LengthController:
    """One length a step for the whole batch, as far as requests and host allow; with or without early stopping.

    Args:
        policy: chooses the length, which is the cap if there is a ``stop``.
        stop: ends drafts before that length.
        tree: how drafts branch, and most nodes of one; None = they are chains.
    """

    def __init__(
        self,
        policy: LengthPolicy,
        planner: ChainPlanner,
        stop: ConfidenceStop | None = None,
        tree: tuple[TreeRule, int] | None = None,
    ) -> None:
        self._policy = policy
        self._planner = planner
        self._stop = stop
        self._tree = tree

    def plan(self, view: StepView) -> SpecPlan:
        wanted = [self._policy.length(view)] * len(view.ids)
        plan = self._planner.plan(view, wanted, self._stop.rule if self._stop else None)
        if self._tree is None:
            return plan
        rule, nodes = self._tree
        return self._planner.branch(view, plan, nodes, rule)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._planner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self._policy.observe(outcome)
        if self._stop is not None:
            self._stop.observe(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing is kept of single requests."""

    def estimates(self) -> Mapping[str, Any]:
        threshold = {} if self._stop is None else {"draft_confidence_threshold": self._stop.threshold}
        return {**self._policy.estimates(), **threshold}


class Constant:
    """``k`` tokens in every step."""

    def __init__(self, k: int) -> None:
        self._k = k

    def length(self, view: StepView) -> int:
        return self._k

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def estimates(self) -> Mapping[str, Any]:
        return {}


class HeuristicController:
    """One k a request: k + 2 after a draft that was accepted whole, else k − 1.

    The rules of ``num_assistant_tokens_schedule`` in Transformers, with what serving adds to them:

    * k stays between the host's shortest and longest draft, so that it does not wind up beyond what can run.
    * Only a draft of the full length k (rounded down to one that can run) counts as accepted whole. A shorter
      one (no room, no longer match, trimmed) is censored: it says nothing about k, and k stays. It also stays
      when the request ended inside the draft. A rejection counts at any length.
    * A request is known from its first draft until it is forgotten; outcomes that come later are ignored.

    Args:
        k: length that requests start with.
        carry_over: start a request with the k that the last finished one ended with (``heuristic``) instead
            of the configured one (``heuristic_transient``).
    """

    def __init__(self, k: int, planner: ChainPlanner, *, carry_over: bool) -> None:
        self._start = k
        self._carry_over = carry_over
        self._planner = planner
        self._k: dict[str, int] = {}

    def plan(self, view: StepView) -> SpecPlan:
        known, start = self._k, self._start
        plan = self._planner.plan(view, [known.get(request, start) for request in view.ids])
        new = [i for i, request in enumerate(view.ids) if request not in known and plan.depth[i] > 0]
        known.update((view.ids[i], start) for i in new)
        return plan

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._planner.trim(view, plan, drafts)

    def observe(self, outcome: StepOutcome) -> None:
        for request, accepted, ended in zip(outcome.ids, outcome.accepted, outcome.ended, strict=True):
            k = self._k.get(request)
            if k is not None:
                self._k[request] = self._next(k, accepted, ended)

    def forget(self, ids: Sequence[str]) -> None:
        for request in ids:
            last = self._k.pop(request, None)
            if last is not None and self._carry_over:
                self._start = last

    def _next(self, k: int, accepted: int, ended: Ended) -> int:
        if ended == "all_accepted" and accepted >= self._planner.runnable(k):
            return min(k + GROWTH, self._planner.longest)
        if ended in ("rejected", "invalid"):
            return max(k - SHRINKAGE, self._planner.shortest)
        return k


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
        raise _ranges_error(value, "a list of at least one range [low, high, k]")
    for entry in value:
        if not _is_range(entry):
            raise _ranges_error(value, f"ranges [low, high, k] of three integers, but one is {entry!r}")
        low, high, k = entry
        if low < 1 or k < 0:
            raise _ranges_error(value, f"batch sizes of at least 1 and k of at least 0, but one range is {list(entry)}")
        if low > high:
            raise _ranges_error(value, f"low ≤ high in every range, but one is {list(entry)}")
    if value[0][0] != 1:
        raise _ranges_error(value, f"a first range that starts at batch size 1, not {value[0][0]}")
    for before, after in pairwise(value):
        if after[0] <= before[1]:
            how = "do not overlap" if after[1] >= before[0] else "ascend"
            raise _ranges_error(value, f"ranges that {how}, but {list(before)} comes before {list(after)}")
    return tuple((low, high, k) for low, high, k in value)


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


def _ranges_error(value: object, expected: str) -> ConfigError:
    return ConfigError(f"{RANGES_KEY} is {value!r}; expected {expected}")


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
        self._acceptance = ELASTIC_START

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
            self._acceptance += ELASTIC_SMOOTHING * (sum(outcome.accepted) / judged - self._acceptance)

    def estimates(self) -> Mapping[str, Any]:
        return {"acceptance": self._acceptance}


def parse_ladder(value: object) -> tuple[int, ...]:
    """The lengths of ``draft_length_options``, checked.

    Raises:
        ConfigError: no list of integers from 1 to 64 that ascend.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise _ladder_error(value, "a list of at least one draft length")
    for length in value:
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_DRAFT_TOKENS:
            raise _ladder_error(value, f"integers from 1 to {MAX_DRAFT_TOKENS}, but one is {length!r}")
    for before, after in pairwise(value):
        if before >= after:
            raise _ladder_error(value, f"lengths that ascend, but {before} comes before {after}")
    return tuple(value)


def ladder_up_to(longest: int) -> tuple[int, ...]:
    """The ladder of a configuration that names none: a third, two thirds and all of ``longest``."""
    return tuple(sorted({max(1, round(longest * part / 3)) for part in (1, 2, 3)}))


def _ladder_error(value: object, expected: str) -> ConfigError:
    return ConfigError(f"{LADDER_KEY} is {value!r}; expected {expected}")
