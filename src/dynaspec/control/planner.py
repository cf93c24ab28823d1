"""Turns the draft lengths a policy would like into a plan that requests and host can carry out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, repeat

from dynaspec.contract.errors import ConfigError, IntegrityError
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepView, StopRule, TreeRule

MAX_DRAFT_TOKENS = 64
"""Longest draft that any policy asks for."""


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


class ChainPlanner:
    """Clamps the lengths that policies ask for; shared by all of them.

    A granted length is the least of the length asked for, ``room_depth`` and the request's own ``max_draft``; then the
    next lower entry of ``limits.draft_lens``. Where the host cannot run ragged batches, every request gets the
    largest length that all of them can run: rooms are hard, so a single request without room or without
    speculation makes it a step of plain decoding.

    Raises:
        ConfigError: ``limits.draft_lens`` does not ascend from 0.
    """

    def __init__(self, limits: Limits) -> None:
        lens = limits.draft_lens
        if not lens or lens[0] != 0 or any(a >= b for a, b in pairwise(lens)):
            raise ConfigError(f"draft_lens is {lens}; expected lengths ascending from 0")
        self._limits = limits
        self._next_lower = tuple(_next_lower(lens))

    @property
    def longest(self) -> int:
        """The longest draft that the host can run."""
        return self._limits.draft_lens[-1]

    @property
    def shortest(self) -> int:
        """The shortest draft that the host can run, apart from none; 0 where it can run none."""
        return self._limits.draft_lens[min(1, len(self._limits.draft_lens) - 1)]

    def runnable(self, length: int) -> int:
        """The largest length ≤ ``length`` that the host can run."""
        return self._next_lower[min(length, self.longest)]

    def plan(
        self,
        view: StepView,
        wanted: Sequence[int],
        stop: StopRule | None = None,
        proposer: tuple[int, ...] | None = None,
        probe_context: int = 0,
    ) -> SpecPlan:
        """A plan of chains.

        Args:
            wanted: the policy's length for each request of ``view``, ≥ 0.
            stop: when to end drafts early.
            proposer: the proposer of each request; None = the first for all.
            probe_context: see ``SpecPlan``.
        """
        depth = self._clamp(view, wanted)
        budget = self._draft_budget(view)
        # Drafts that may end early are better cut after drafting, when their true lengths are known.
        late = stop is not None and self._limits.can_trim and self._limits.ragged
        if budget is not None and not late:
            depth = self._round(admit(depth, budget, first=view.step))
        return SpecPlan(
            step=view.step,
            depth=depth,
            proposer=proposer or (0,) * len(depth),
            nodes=depth,
            stop=stop if any(depth) else None,
            verify_nodes=budget,
            probe_context=probe_context,
        )

    def branch(self, view: StepView, plan: SpecPlan, nodes: int, rule: TreeRule) -> SpecPlan:
        """The same plan with trees of up to ``nodes`` nodes, within what each request and its own limit allow."""
        if not any(plan.depth):
            return plan
        sizes = []
        for depth, room, most in zip(plan.depth, view.room_nodes, view.max_draft, strict=True):
            size = min(nodes, room) if most is None else min(nodes, room, most)
            if rule.shape is not None:  # nodes are in order of depth
                size = min(size, bisect_right(rule.shape.depths, depth))
            sizes.append(size if depth else 0)
        depths = tuple(map(min, plan.depth, sizes))
        return replace(plan, depth=depths, nodes=tuple(sizes), tree=rule)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        """The plan at the lengths actually drafted, within ``verify_nodes``, without looking at any token.

        Slots are admitted in order of position over all requests (see ``admit``). On hosts that
        cannot trim, or not to different lengths, the plan itself was within the budget.
        """
        drafted = tuple(map(min, plan.nodes, drafts.length))
        if plan.verify_nodes is not None:
            drafted = admit(drafted, plan.verify_nodes, first=view.step)
        return plan if drafted == plan.nodes else plan.with_nodes(tuple(map(min, plan.depth, drafted)), drafted)

    def _clamp(self, view: StepView, wanted: Sequence[int]) -> tuple[int, ...]:
        longest = self.longest
        depth = tuple(map(min, wanted, view.room_depth, repeat(longest)))
        if view.max_draft.count(None) < len(view.max_draft):
            depth = tuple(k if most is None else min(k, most) for k, most in zip(depth, view.max_draft, strict=True))
        if depth and min(depth) < 0:
            raise IntegrityError(f"a limit or length is {min(depth)}; expected none below 0")
        return self._round(depth)

    def _round(self, depth: Sequence[int]) -> tuple[int, ...]:
        lens = tuple(map(self._next_lower.__getitem__, depth))
        if lens and not self._limits.ragged:
            return (min(lens),) * len(lens)
        return lens

    def _draft_budget(self, view: StepView) -> int | None:
        """Drafted tokens that the target pass has rows for, beside one a request and prefill chunks."""
        if self._limits.verify_budget is None:
            return None
        return max(0, self._limits.verify_budget - len(view.ids) - view.prefill_tokens)


def _next_lower(lens: Sequence[int]) -> list[int]:
    table, entry = [], 0
    for length in range(lens[-1] + 1):
        if entry + 1 < len(lens) and lens[entry + 1] <= length:
            entry += 1
        table.append(lens[entry])
    return table
