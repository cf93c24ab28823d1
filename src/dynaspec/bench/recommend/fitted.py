"""Step costs learnt from decision logs, as the simulator prices steps."""

from __future__ import annotations

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.work import Drafting
from dynaspec.simulate.costs import StepTime
from dynaspec.simulate.load import StepLoad

from ..explain.costs import LogCosts


class FittedCosts:
    """Prices by the work of a step.

    Args:
        costs: of the log's steps.
        measured: passes measured when the host started, which controllers are told; None = none.
        idle_pass: the drafter's first pass runs in every step, drafts or not.
    """

    kv_tokens: int | None = None

    def __init__(self, costs: LogCosts, measured: PassCosts | None, *, name: str, idle_pass: bool) -> None:
        self.name = name
        self._costs = costs
        self._measured = measured or PassCosts()
        self._idle_pass = idle_pass

    def without_drafter(self) -> FittedCosts:
        """What steps cost where no drafter is loaded."""
        return FittedCosts(self._costs, self._measured, name=self.name, idle_pass=False)

    def time(self, load: StepLoad) -> StepTime:
        work = load.work
        drafting = self._drafting(load)
        steps = self._costs.steps
        return StepTime(
            draft_s=steps.draft_s(drafting) if drafting.passes else 0.0,
            verify_s=steps.target_s(work.verify_rows + work.prefill_rows, load.context, work.kv_tokens),
        )

    def pass_costs(self) -> PassCosts:
        return self._measured

    def _drafting(self, load: StepLoad) -> Drafting:
        rows, drawn = load.work.rows_per_pass, sum(load.drafting)
        total, passes = sum(rows), len(rows)
        if self._idle_pass:
            # The first pass has the rows of the target's.
            total += load.work.verify_rows + load.work.prefill_rows - (rows[0] if rows else 0)
            passes = max(1, passes)
        return Drafting(self._costs.drafter, passes, drawn, total - drawn)
