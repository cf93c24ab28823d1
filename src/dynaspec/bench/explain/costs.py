"""What a step of given work costs, fitted to the recorded steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations

import numpy as np

from dynaspec.contract.costs import Curve, PassCosts

from .data import Floats, LogData, most_used_proposer

HUBER = 1.345
"""Residuals beyond this many standard deviations count less: the usual choice."""
NORMAL = 1.4826
"""Standard deviations in a median absolute one, for normal errors."""
EXACT = 0.01
"""Relative errors below this are none: else steps that are all alike would outweigh every other one."""
ROUNDS = 12
_CONTEXT = 256.0
"""KV entries that the rows of passes measured at start-up see, where they see any."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """[n] The work of steps, whether done or imagined."""

    requests: Floats
    drafting: Floats
    passes: Floats
    draft_rows: Floats
    verify_rows: Floats
    kv_tokens: Floats
    kv_read: Floats
    prefill_rows: Floats

    def units(self) -> dict[str, Floats]:
        """[n] of everything that may cost time.

        The first rows of a target pass often cost more than later ones, so they are also counted up to each knot:
        prices ≥ 0 then make a curve that flattens. A request's KV is read once, and each of its rows computed with it.
        """
        rows = self.verify_rows + self.prefill_rows
        return {
            "step": np.ones_like(rows),
            "request": self.requests,
            "drafting request": self.drafting,
            "drafter pass": self.passes,
            "drafter row": self.draft_rows,
            "target row": rows,
            **{f"target row, up to {knot}": np.minimum(rows, knot) for knot in KNOTS},
            "KV entry of a request": self.kv_read,
            "KV entry of a row": self.kv_tokens,
            "prefill row": self.prefill_rows,
        }


KNOTS = (4, 16, 64)
_ROWS = ("target row", *(f"target row, up to {knot}" for knot in KNOTS))
_TARGET = ("step", *_ROWS, "KV entry of a request", "KV entry of a row")
_DRAFT = ("drafter pass", "drafter row", "drafting request")
_REST = ("step", "request", "prefill row")
_WHOLE = (*_TARGET, "drafter pass", "drafter row")
"""For hosts that measure steps only."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What steps cost by their work."""

    seconds: Mapping[str, float]
    """Of one unit of each work, ≥ 0; see ``StepWork.units``."""
    error: float
    """Median of |fitted / measured − 1| over steps."""
    plain_steps: int
    """Decoding steps without any drafted token, which the price of plain decoding rests on."""
    profiled: bool
    """The start-up profile in the log's header helped."""

    def price(self, work: StepWork) -> Floats:
        """[n] seconds"""
        units = work.units()
        total = np.zeros_like(work.requests)
        for name, seconds in self.seconds.items():
            total += seconds * units[name]
        return total


def recorded_work(data: LogData) -> StepWork:
    """[S] What the steps of the log did."""
    return StepWork(*(getattr(data.steps, field.name).astype(np.float64) for field in fields(StepWork)))


def fit_costs(data: LogData) -> StepCosts | None:
    """Nonnegative least squares of relative errors, robust against single slow steps; None without any time.

    Drafting, verification and the rest are fitted apart, which tells them apart even where their work always goes
    together. Points of a start-up profile (``costs`` in the header) are joined to the measured passes.
    """
    steps, work = data.steps, recorded_work(data)
    measured = steps.step_s > 0
    if not measured.any():
        return None
    target, drafter = _profile(data)
    if steps.verify_s.any():
        seconds = Counter(_fit(_DRAFT, [(work, steps.draft_s), drafter]))
        seconds.update(_fit(_TARGET, [(work, steps.verify_s), *target]))
        rest = (steps.step_s - steps.draft_s - steps.verify_s).clip(min=0)
        seconds.update(_fit(_REST, [(work, rest)]))
    else:
        seconds = Counter(_fit(_WHOLE, [(work, steps.step_s), *target]))
    plain = int(((steps.requests > 0) & (steps.verify_rows <= steps.requests)).sum())
    costs = StepCosts(seconds, error=0.0, plain_steps=plain, profiled=target[0][1].size > 0)
    error = np.median(np.abs(costs.price(work)[measured] / steps.step_s[measured] - 1))
    return replace(costs, error=float(error))


def nonnegative_least_squares(x: Floats, y: Floats) -> Floats:
    """The b ≥ 0 that minimises |x·b − y|², by trying every set of columns; of equals, the one with fewer.

    Args:
        x: [n, m] with few columns.
        y: [n]
    """
    columns = x.shape[1]
    best, best_error = np.zeros(columns), float(y @ y)
    gram, moment = x.T @ x, x.T @ y
    for size in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), size)):
            solution = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], moment[chosen], rcond=1e-10)[0]
            if solution.min() < 0:
                continue
            error = float(((x[:, chosen] @ solution - y) ** 2).sum())
            if error < best_error - 1e-9 * float(y @ y):
                best, best_error = np.zeros(columns), error
                best[chosen] = solution
    return best


def _fit(names: Sequence[str], measured: Sequence[tuple[StepWork, Floats]]) -> dict[str, float]:
    """Seconds a unit of each work named.

    Columns are scaled for the solver's sake, rows so that relative errors count. Where works always went together, the
    one named first gets the price.
    """
    columns = [[work.units()[name] for name in names] for work, _ in measured]
    x = np.vstack([np.column_stack(units) for units in columns])
    y = np.concatenate([seconds for _, seconds in measured])
    if not (y > 0).any():
        return {}
    scale = np.abs(x).max(axis=0)
    scale[scale == 0] = 1.0
    x, weight = x / scale, 1 / (y + float(np.median(y[y > 0])))
    found, robust = np.zeros(len(names)), np.ones_like(y)
    for _ in range(ROUNDS):
        root = np.sqrt(robust) * weight
        found = nonnegative_least_squares(x * root[:, None], y * root)
        residual = np.abs(x @ found - y) * weight
        spread = max(EXACT, HUBER * NORMAL * float(np.median(residual)))
        robust = np.minimum(1.0, spread / residual.clip(min=spread))
    return dict(zip(names, (found / scale).tolist(), strict=True))


Passes = tuple[StepWork, Floats]
"""[n] Work of passes, and their seconds."""


def _profile(data: LogData) -> tuple[list[Passes], Passes]:
    """Target's and drafter's passes measured at start-up; none without a profile.

    A log of one draft length does not tell what a row takes for a KV entry from what its request takes. Start-up does:
    of each pass there is one without context, one in which all rows are of one request, and one of as many requests.
    """
    costs = data.header.costs or PassCosts()
    rows, seconds = _columns(costs.target)
    none = np.zeros_like(rows)
    target = []
    for context in (0.0, _CONTEXT) if costs.context_s or costs.read_s else (0.0,):
        for requests in (np.ones_like(rows), rows)[: 1 + (context > 0)]:
            seen, read = context * rows, context * requests
            work = StepWork(none, none, none, none, verify_rows=rows, kv_tokens=seen, kv_read=read, prefill_rows=none)
            target.append((work, seconds + costs.context_s * seen + costs.read_s * read))
    used = most_used_proposer(data)
    rows, seconds = _columns(costs.drafters[used] if used < len(costs.drafters) else ())
    one, none = np.ones_like(rows), np.zeros_like(rows)
    return target, (StepWork(none, rows, one, rows, none, none, none, none), seconds)


def _columns(curve: Curve) -> tuple[Floats, Floats]:
    rows, seconds = np.array(curve, dtype=np.float64).reshape(-1, 2).T
    return rows, seconds
