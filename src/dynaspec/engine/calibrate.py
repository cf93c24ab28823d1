"""What the models' passes cost here: a few trials as an engine starts, for policies that weigh costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynaspec.contract.costs import Curve, PassCosts
from dynaspec.kv.arena import Arena
from dynaspec.model.base import Model
from dynaspec.model.batch import ForwardBatch

TARGET_ROWS = (1, 2, 4, 8, 16, 32, 64)
DRAFTER_ROWS = (1, 4, 16)
TRIALS = 3
BUDGET_S = 1.0
"""Once the trials have taken longer, no larger passes are tried."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A model and its KV."""

    model: Model
    arena: Arena

    def run(self, rows: int) -> None:
        """A pass over rows that write no KV and see none, with the logits of all of them; waits for the device."""
        batch = ForwardBatch(
            tokens=torch.zeros(rows, dtype=torch.int64, device=self.model.device),
            positions=np.zeros(rows, dtype=np.int64),
            slots=np.full(rows, -1, dtype=np.int64),
            query_start=np.arange(rows + 1, dtype=np.int32),
            context_lens=np.zeros(rows, dtype=np.int32),
            block_tables=np.zeros((rows, 1), dtype=np.int32),
        )
        self.model.logits(self.model.forward(batch, self.arena.layers).hidden)[0, 0].item()


def measure_costs(
    target: Runner, drafters: Sequence[Runner | None], clock: Callable[[], float], max_rows: int
) -> PassCosts:
    """Times passes of each model, smallest first.

    Attention is not in it, as it depends on the contexts more than on the rows.

    Args:
        drafters: one entry a proposer; None for one that runs no model.
        clock: seconds.
        max_rows: most rows of a target pass.
    """
    deadline = clock() + BUDGET_S
    curves = tuple(() if drafter is None else _curve(drafter, DRAFTER_ROWS, clock, deadline) for drafter in drafters)
    sizes = tuple(rows for rows in TARGET_ROWS if rows <= max_rows)
    return PassCosts(target=_curve(target, sizes, clock, deadline), drafters=curves)


def _curve(runner: Runner, sizes: Sequence[int], clock: Callable[[], float], deadline: float) -> Curve:
    """(rows, seconds); the smallest size even after the deadline.

    Of the trials the fastest counts: what else the machine is doing only ever adds.
    """
    points: list[tuple[int, float]] = []
    for rows in sizes:
        if points and clock() > deadline:
            break
        runner.run(rows)  # compiles, and warms caches up
        points.append((rows, min(_seconds(runner, rows, clock) for _ in range(TRIALS))))
    return tuple(points)


def _seconds(runner: Runner, rows: int, clock: Callable[[], float]) -> float:
    started = clock()
    runner.run(rows)
    return clock() - started
