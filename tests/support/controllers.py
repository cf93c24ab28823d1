"""A controller for tests that changes its mind in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView, StopRule, TreeRule
from dynaspec.contract.tree import TokenTree
from dynaspec.control.planner import ChainPlanner

SHAPE = TokenTree.parse([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)])


class VaryingController:
    """Random lengths, trees, proposers, stop rules, KV gates, probes and trims, for every request and step anew; a
    length of 0 as often as not.

    What it does is a function of the seed and the view's step. Its trim is causal: it draws lengths without looking.
    """

    def __init__(self, limits: Limits, *, seed: int = 0) -> None:
        self._limits = limits
        self._planner = ChainPlanner(limits)
        self._seed = seed
        self.lengths: set[int] = set()
        """All that were granted."""

    def plan(self, view: StepView) -> SpecPlan:
        random, size = self._random(view, 0), len(view.ids)
        wanted = random.integers(0, self._planner.longest + 1, size) * random.integers(0, 2, size)
        if random.random() < 0.1:
            wanted[:] = 0
        plan = self._planner.plan(view, wanted.tolist(), self._stop(random, size))
        proposer = random.integers(0, len(self._limits.proposers), size)
        self.lengths.update(plan.depth)
        gate = float(random.random()) if self._limits.can_gate and random.random() < 0.5 else 0.0
        probe_context = int(random.integers(1, 40)) if random.random() < 0.3 else 0
        plan = replace(plan, proposer=tuple(proposer.tolist()), gate_kv_below=gate, probe_context=probe_context)
        trees = self._limits.can_branch and any(traits.trees for traits in self._limits.proposers)
        if not trees or random.random() < 0.6:
            return plan
        below = (0.0,) if random.random() < 0.5 else tuple(random.random(4).tolist())
        later = float(random.random())
        shape = SHAPE if random.random() < 0.5 else None
        return self._planner.branch(view, plan, int(random.integers(1, 25)), TreeRule(3, below, later, shape))

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        plan = self._planner.trim(view, plan, drafts)
        most = self._random(view, 1).integers(0, 2 * self._planner.longest, len(view.ids))
        nodes = tuple(map(min, plan.nodes, most.tolist()))
        return plan.with_nodes(tuple(map(min, plan.depth, nodes)), nodes)

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing was kept."""

    def _random(self, view: StepView, part: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, view.step, part))

    def _stop(self, random: np.random.Generator, size: int) -> StopRule | None:
        below = tuple(random.random(self._planner.longest).tolist())
        kind = random.integers(5) if all(p.has_confidence for p in self._limits.proposers) else 4
        if kind == 0:
            return StopRule(below)
        if kind == 1:
            return StopRule(below, scope="batch_mean")
        if kind == 2:
            return StopRule(below, signal="token_prob")
        if kind == 3:
            offset = tuple(random.normal(0.0, 1.0, size).tolist())
            return StopRule(below, signal="survival", weight=0.8, bias=(1.0, 0.5), offset=offset)
        return None
