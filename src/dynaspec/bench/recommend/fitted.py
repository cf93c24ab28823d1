"""Step costs fitted to decision logs, as the simulator prices steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dynaspec.contract.costs import PassCosts
from dynaspec.simulate.costs import StepTime
from dynaspec.simulate.load import StepLoad

from ..explain.costs import StepCosts, StepWork

_NOTHING = np.zeros(())


class FittedCosts:
    """Prices by the work of a step.

    Args:
        measured: passes measured when the host started, which controllers are told; None = none.
        idle_pass: the drafter's first pass runs in every step, drafts or not.
    """

    kv_tokens: int | None = None

    def __init__(self, costs: StepCosts, measured: PassCosts | None, *, name: str, idle_pass: bool) -> None:
        self.name = name
        self._costs = costs
        self._measured = measured or PassCosts()
        self._idle_pass = idle_pass

    def without_drafter(self) -> FittedCosts:
        """What steps cost where no drafter is loaded."""
        return FittedCosts(self._costs, self._measured, name=self.name, idle_pass=False)

    def time(self, load: StepLoad) -> StepTime:
        work = self._work(load)
        target = replace(work, drafting=_NOTHING, passes=_NOTHING, draft_rows=_NOTHING)
        verify_s, step_s = float(self._costs.price(target)), float(self._costs.price(work))
        return StepTime(draft_s=max(0.0, step_s - verify_s), verify_s=verify_s)

    def pass_costs(self) -> PassCosts:
        return self._measured

    def _work(self, load: StepLoad) -> StepWork:
        work = load.work
        passes, rows = len(work.rows_per_pass), sum(work.rows_per_pass)
        if self._idle_pass:
            # The first pass has the rows of the target's.
            passes = max(1, passes)
            rows += work.verify_rows + work.prefill_rows - (work.rows_per_pass[0] if work.rows_per_pass else 0)
        drafting = load.drafting[0] if load.drafting else 0
        counts = (
            *(load.requests, drafting, passes, rows),
            *(work.verify_rows, work.kv_tokens, load.context, work.prefill_rows),
        )
        return StepWork(*(np.asarray(float(count)) for count in counts))
