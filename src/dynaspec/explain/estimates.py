"""Acceptance and step costs, learnt from decision logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dynaspec.contract.costs import Curve, PassCosts, runs_model
from dynaspec.contract.step import ProposerTraits
from dynaspec.control.estimate.acceptance import POSITIONS, AcceptanceModel
from dynaspec.control.estimate.costs import MeasuredStep, StepCosts, target_s
from dynaspec.control.estimate.settings import AutoSettings

from .log_data import Flags, Floats, Ints, LogData, Verdicts, most_used_proposer

BINS = 10
_ACCEPTANCE_SETTINGS = AutoSettings(memory=1e9, surprise=1e9)
"""Nothing is forgotten."""
_ACCEPTANCE_EPOCHS = 2
"""In the last, requests are held against an average that is known by then."""
_COST_SETTINGS = AutoSettings(drift=0.0)
"""One price for all of it: the speed factor does not follow the moment."""
_COST_EPOCHS = 3
_BEGINNINGS = 2
_DISTURBED = 0.3
"""A step whose logarithm of measured over learnt seconds is beyond this was disturbed, and teaches nothing."""
_DEVIATIONS = 3.0
"""The same in standard deviations, where that is more."""
_NORMAL = 1.4826
"""Standard deviations in a median absolute one, for normal errors."""
_UNKNOWN = (ProposerTraits("unknown"),)


@dataclass(frozen=True, slots=True)
class ByPosition:
    """[J] Conditional acceptance: of the drafts right up to a position, those right there."""

    tested: Ints
    accepted: Ints


@dataclass(frozen=True, slots=True)
class Calibration:
    """Predictions in bins, against what happened; bins without any are left out."""

    predicted: Floats
    """[b] mean prediction."""
    observed: Floats
    """[b] share accepted."""
    count: Ints
    """[b]"""
    auc: float | None
    """Chance that an accepted token had the higher prediction than a rejected one; None without both kinds."""
    error: float
    """Mean |predicted − observed| over tokens."""


def by_position(tests: Verdicts) -> ByPosition:
    size = int(tests.position.max(initial=-1)) + 1
    return ByPosition(
        tested=np.bincount(tests.position, minlength=size),
        accepted=np.bincount(tests.position[tests.accepted], minlength=size),
    )


def learn_acceptance(tests: Verdicts, requests: int) -> AcceptanceModel:
    """Acceptance by position and request, of all of the log alike; a request's slot is its index.

    Args:
        requests: how many there are.
    """
    first = np.flatnonzero(tests.position == 0)
    length = np.diff(first, append=tests.position.size)
    right = np.add.reduceat(tests.accepted, first, dtype=np.int64) if first.size else first
    model = AcceptanceModel(_ACCEPTANCE_SETTINGS, signal=False)
    for _ in range(_ACCEPTANCE_EPOCHS):
        for slot in range(requests):
            model.admit(slot)
        model.observe(tests.request[first], length, length, right, np.zeros(tests.position.size))
    return model


def chances(model: AcceptanceModel, requests: Ints, length: int) -> Floats:
    """[n, length] conditional acceptance by position, for each of these requests [n]."""
    biases = model.biases()[np.minimum(np.arange(length), POSITIONS - 1)]
    logit = biases[None, :] + model.offsets(requests)[:, None]
    return np.asarray(1.0 / (1.0 + np.exp(-logit)), dtype=np.float64)


def calibrate(predicted: Floats, accepted: Flags) -> Calibration | None:
    """Bins of equal width over 0 … 1; None where there is no finite prediction."""
    finite = np.isfinite(predicted)
    predicted, accepted = predicted[finite], accepted[finite]
    if not predicted.size:
        return None
    bins = np.clip((predicted * BINS).astype(np.int64), 0, BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    some = count > 0
    mean = np.bincount(bins, weights=predicted, minlength=BINS)[some] / count[some]
    share = np.bincount(bins, weights=accepted, minlength=BINS)[some] / count[some]
    error = float(np.abs(mean - share) @ count[some] / count.sum())
    return Calibration(mean, share, count[some], area_under_curve(predicted, accepted), error)


def area_under_curve(predicted: Floats, accepted: Flags) -> float | None:
    """The ROC curve's, by ranks; ties count half."""
    hits = int(accepted.sum())
    misses = accepted.size - hits
    if not hits or not misses:
        return None
    ordered = np.sort(predicted)
    first = np.searchsorted(ordered, predicted, side="left")
    last = np.searchsorted(ordered, predicted, side="right")
    ranks = (first + last + 1) / 2
    return float((ranks[accepted].sum() - hits * (hits + 1) / 2) / (hits * misses))


@dataclass(frozen=True, slots=True)
class StepWork:
    """[n] The work of steps, whether done or imagined; see ``LogCosts.drafter``."""

    verify_rows: Floats
    prefill_rows: Floats
    kv_read: Floats
    """Σ over the requests of their KV entries."""
    kv_tokens: Floats
    """Σ over the target's rows of the KV entries that each sees."""
    drafts: Floats
    """1 where the drafter drafts; a chance in imagined steps."""
    passes: Floats
    """Of the drafter."""
    drawn: Floats
    """Rows that a token is drawn from."""
    read_in: Floats
    """Rows on top of them."""


@dataclass(frozen=True, slots=True)
class LogCosts:
    """What a log's steps cost by their work."""

    steps: StepCosts
    drafter: int
    """Index of the proposer whose drafts are priced: of those that run a model, if any has, the one used most. What
    others draft beside it takes nothing that counts."""
    rows: int
    """Most rows of a target pass in the log."""
    error: float
    """Median of |learnt / measured − 1| over steps."""
    plain_steps: int
    """Decoding steps without any drafted token, which the price of plain decoding rests on."""
    profiled: bool
    """The start-up profile in the log's header helped."""

    def price(self, work: StepWork) -> Floats:
        """[n] seconds"""
        costs = self.steps
        rows, place = np.unique(np.maximum(work.verify_rows + work.prefill_rows, 1.0), return_inverse=True)
        passes = np.array([target_s(costs.knots, costs.curve, each) for each in rows.tolist()])
        start, one, row, read_in = costs.draft_terms(self.drafter)
        host_s, read_s, seen_s = costs.rest_s
        total = passes[place] + host_s + read_s * work.kv_read + seen_s * work.kv_tokens
        total += start * work.drafts + one * work.passes + row * work.drawn + read_in * work.read_in
        return np.asarray(total, dtype=np.float64)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Of one more of each work."""
        costs = self.steps
        seen = [1.0, *costs.knots[(costs.knots > 1.0) & (costs.knots < self.rows)].tolist(), float(self.rows)]
        passes = {f"target pass over {rows:.0f} rows": target_s(costs.knots, costs.curve, rows) for rows in seen}
        start, one, row, read_in = costs.draft_terms(self.drafter)
        host_s, read_s, seen_s = costs.rest_s
        return {
            **passes,
            "KV entry of a request": read_s,
            "KV entry of a row": seen_s,
            "step, without passes": host_s,
            "draft": start,
            "drafter pass": one,
            "drafter row": row,
            "drafter row that is only read in": read_in,
        }


def recorded_work(data: LogData) -> StepWork:
    """[S] What the steps of the log did."""
    steps, rows = data.steps, data.rows
    kinds = [traits.passes_per_draft for traits in data.limits.proposers or _UNKNOWN]
    # Of several proposers, those that run no model draw no rows.
    kind = np.array([*kinds, "per_token"])[np.minimum(rows.proposer, len(kinds))]
    tokens = np.where(kind == "per_token", rows.drafted, (kind == "one") & (rows.drafted > 0))
    size = steps.number.size
    drawn = np.minimum(np.bincount(rows.step, weights=tokens, minlength=size), steps.draft_rows)
    own = (rows.drafted > 0) & (rows.proposer == _drafter(data))
    return StepWork(
        verify_rows=steps.verify_rows.astype(np.float64),
        prefill_rows=steps.prefill_rows.astype(np.float64),
        kv_read=steps.kv_read.astype(np.float64),
        kv_tokens=steps.kv_tokens.astype(np.float64),
        drafts=np.maximum(steps.passes > 0, np.bincount(rows.step, weights=own, minlength=size) > 0).astype(np.float64),
        passes=steps.passes.astype(np.float64),
        drawn=drawn,
        read_in=(steps.draft_rows - drawn).astype(np.float64),
    )


def fit_costs(data: LogData) -> LogCosts | None:
    """Teaches the log's steps, several times over; None without any time.

    Where the host timed it, drafting is taught apart, which tells it from the rest even where their work always goes
    together. Learning begins with the start-up profile (``costs`` in the header), and again without the steps that
    turned out to have been disturbed. Where there is no such profile, it begins some times more with what was learnt of
    the passes that the log has, so that others are priced by a straight line from these.
    """
    steps, work = data.steps, recorded_work(data)
    measured = steps.step_s > 0
    if not measured.any():
        return None
    rows = work.verify_rows + work.prefill_rows
    profile = data.header.costs or PassCosts()
    found = LogCosts(
        steps=_taught(data, work, profile, measured),
        drafter=_drafter(data),
        rows=int(rows.max(initial=1.0)),
        error=0.0,
        plain_steps=int(((steps.requests > 0) & (steps.verify_rows <= steps.requests)).sum()),
        profiled=bool(profile.target),
    )
    usual = measured & ~_disturbed(steps.step_s, found.price(work), measured)
    costs = _taught(data, work, profile, usual)
    for _ in range(0 if profile.target else _BEGINNINGS):
        costs = _taught(data, work, replace(profile, target=_seen(costs, rows[usual & (rows > 0)])), usual)
    found = replace(found, steps=costs)
    error = np.median(np.abs(found.price(work)[measured] / steps.step_s[measured] - 1))
    return replace(found, error=float(error))


def _taught(data: LogData, work: StepWork, profile: PassCosts, of: Flags) -> StepCosts:
    """The cost model after these steps."""
    steps, drafter = data.steps, _drafter(data)
    # A pass that runs in any case is told from the target's here: an engine without a drafter does without it.
    proposers = [replace(traits, idle_pass=False) for traits in data.limits.proposers or _UNKNOWN]
    costs = StepCosts(profile, proposers, _COST_SETTINGS)
    apart = bool(steps.verify_s.any())
    columns = (
        *(work.verify_rows + work.prefill_rows, work.kv_read, work.kv_tokens),
        *(work.drafts, work.passes, work.drawn, work.read_in, steps.step_s, steps.draft_s),
    )
    told = []
    for rows, read, seen, drafts, *drafting, step_s, draft_s in np.column_stack(columns)[of].tolist():
        seconds = (step_s - draft_s, draft_s) if apart and drafts else (step_s, -1.0)
        told.append(MeasuredStep(rows, read, seen, *seconds, *((drafter, *drafting) if drafts else ())))
    for _ in range(_COST_EPOCHS):
        costs.observe(*told)
    return costs


def _seen(costs: StepCosts, rows: Floats) -> Curve:
    """What was learnt of passes over about as many rows as those of steps [n]."""
    near = np.clip(2.0 ** np.round(np.log2(rows)), rows.min(initial=np.inf), rows.max(initial=1.0))
    return tuple((int(each), target_s(costs.knots, costs.curve, each)) for each in np.unique(near).tolist())


def _drafter(data: LogData) -> int:
    models = [i for i, traits in enumerate(data.limits.proposers) if runs_model(traits)]
    used = most_used_proposer(data)
    if used in models or not models or not data.steps.passes.any():
        return min(used, max(0, len(data.limits.proposers) - 1))
    return max(models, key=lambda i: int((data.rows.drafted * (data.rows.proposer == i)).sum()))


def _disturbed(seconds: Floats, learnt: Floats, measured: Flags) -> Flags:
    """[n] Steps that took so much longer than others of the same work that something else went on."""
    off = np.log(seconds, out=np.zeros_like(seconds), where=measured) - np.log(learnt)
    off -= np.median(off[measured])
    spread = _NORMAL * float(np.median(np.abs(off[measured])))
    return np.asarray(measured & (off > max(_DISTURBED, _DEVIATIONS * spread)))
