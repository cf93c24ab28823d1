"""What the models' passes cost here: a few trials as an engine starts, for policies that weigh costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dynaspec.contract.costs import Curve, PassCosts
from dynaspec.kv.arena import Arena
from dynaspec.model.base import Model
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch

TARGET_ROWS = (1, 4, 8, 14, 16, 28, 32, 64)
DRAFTER_ROWS = (1, 4, 16)
CONTEXT_ROWS, CONTEXT = 16, 256
"""Rows, and the KV entries that each sees, of the passes that tell what context costs."""
AROUND_PASS_S, AROUND_DRAFT_S, AROUND_DRAFT_PASS_S = 4e-4, 2.5e-4, 5e-5
"""What the host does beside the model's work, in the target's pass, in a draft and in each of its passes: seconds on a
server's CPU, as a first guess. The first steps tell; but what they take more than was expected is laid upon all that
they did, and drafting looks dear until many have been seen."""
TRIALS = 8
BUDGET_S = 1.0
"""Once the trials have taken longer, no larger passes are tried."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A model and its KV."""

    model: Model
    arena: Arena

    def run(self, rows: int, context: int = 0) -> None:
        """A pass over rows that write no KV, with the logits of all of them; waits for the device.

        Args:
            context: KV entries that each row sees, whatever is in them; as many as arena and positions have at most.
        """
        blocks = self.arena.layers[0][0].shape[0]
        context = min(context, (blocks - 1) * BLOCK_SIZE, self.model.config.max_position - 1)
        width = context // BLOCK_SIZE + 1
        batch = ForwardBatch(
            tokens=torch.zeros(rows, dtype=torch.int64, device=self.model.device),
            positions=np.full(rows, context, dtype=np.int64),
            slots=np.full(rows, -1, dtype=np.int64),
            query_start=np.arange(rows + 1, dtype=np.int32),
            context_lens=np.full(rows, context, dtype=np.int32),
            block_tables=(np.arange(rows * width, dtype=np.int32) % blocks).reshape(rows, width),
        )
        self.model.logits(self.model.forward(batch, self.arena.layers).hidden)[0, 0].item()


def measure_costs(
    target: Runner, drafters: Sequence[Runner | None], clock: Callable[[], float], max_rows: int
) -> PassCosts:
    """Times passes of each model, smallest first; of the trials the fastest counts, as what else the machine is doing
    only ever adds.

    Args:
        drafters: one entry a proposer; None for one that runs no model.
        clock: seconds.
        max_rows: most rows of a target pass.
    """
    deadline = clock() + BUDGET_S
    timed = [((), 0.0) if drafter is None else _drafting(target, drafter, clock, deadline) for drafter in drafters]
    sizes = tuple(rows for rows in TARGET_ROWS if rows <= max_rows)
    curve = _target_curve(target, sizes, clock, deadline)
    return PassCosts(
        target=curve,
        drafters=tuple(passes for passes, _ in timed),
        first_s=tuple(first for _, first in timed),
        context_s=_context(target, dict(curve), clock) if clock() <= deadline else 0.0,
    )


def _target_curve(target: Runner, sizes: Sequence[int], clock: Callable[[], float], deadline: float) -> Curve:
    """(rows, seconds); the smallest size even after the deadline."""
    points: list[tuple[int, float]] = []
    for rows in sizes:
        if points and clock() > deadline:
            break
        target.run(rows)  # compiles, and warms caches up
        points.append((rows, AROUND_PASS_S + min(_seconds(target, rows, clock) for _ in range(TRIALS))))
    return tuple(points)


def _drafting(target: Runner, drafter: Runner, clock: Callable[[], float], deadline: float) -> tuple[Curve, float]:
    """(rows, seconds) of a pass after another, and what one takes more when it comes after the target's."""
    points: list[tuple[int, float]] = []
    extra = []
    for rows in DRAFTER_ROWS:
        if points and clock() > deadline:
            break
        drafter.run(rows)
        trials = []
        for _ in range(TRIALS):
            target.run(1)
            trials.append((_seconds(drafter, rows, clock), _seconds(drafter, rows, clock)))
        first, later = (min(column) for column in zip(*trials, strict=True))
        points.append((rows, AROUND_DRAFT_PASS_S + later))
        extra.append(max(0.0, first - later))
    return tuple(points), AROUND_DRAFT_S + sum(extra) / len(extra)


def _context(target: Runner, without: Mapping[int, float], clock: Callable[[], float]) -> float:
    """Seconds for each KV entry that a row sees."""
    if CONTEXT_ROWS not in without:
        return 0.0
    target.run(CONTEXT_ROWS, CONTEXT)
    seconds = min(_seconds(target, CONTEXT_ROWS, clock, CONTEXT) for _ in range(TRIALS))
    return max(0.0, AROUND_PASS_S + seconds - without[CONTEXT_ROWS]) / (CONTEXT_ROWS * CONTEXT)


def _seconds(runner: Runner, rows: int, clock: Callable[[], float], context: int = 0) -> float:
    started = clock()
    runner.run(rows, context)
    return clock() - started
