"""Why steps drafted or not, and what plain decoding, fixed lengths and the oracle would have done, from the log alone.

Known: how many drafted tokens would have been accepted, as far as the draft went or up to the first rejection. Not
known: what lies behind a draft that was accepted whole, or where nothing was drafted. There the log's conditional
acceptance by position and request stands in. Steps are taken as a sample of all places in the text, though another
policy's steps would begin elsewhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from .estimates import LogCosts, StepWork, chances, learn_acceptance, recorded_work
from .log_data import UNKNOWN, Flags, Floats, LogData, most_used_proposer

DRAFTED = "drafted for"
NO_ROOM = "no room: its last token, or the end of the model's context"
REQUESTED_OFF = "the request asked for no speculation"
POLICY = "the policy chose plain decoding"
HOST = "granted by the policy, taken back by the host (no KV blocks, or no proposer)"
NOTHING = "granted, but the proposer had nothing (no match, still catching up, or a fault)"
TRIMMED = "drafted, but all of it was trimmed before verification"
_NOT_YET = ", but that was not confirmed yet, or too little to repay the change"
LONGEST = 32
"""Beyond this no fixed length is tried and the oracle drafts no further."""


def step_reason(data: LogData, step: int) -> str:
    """Why the controller chose what it did in a step: in its own words, else by its expectations; empty = not known."""
    mode, plain, drafting = data.modes[step], data.steps.plain_goodput[step], data.steps.draft_goodput[step]
    if data.reasons[step]:
        return data.reasons[step]
    if mode == "plain" and drafting == 0.0:
        return "nothing could be drafted"
    if mode not in ("plain", "speculate") or np.isnan(plain) or np.isnan(drafting):
        return ""
    if drafting > plain:
        late = "" if mode == "speculate" else _NOT_YET
        return f"drafting was expected to be faster{late}"
    late = "" if mode == "plain" else _NOT_YET
    return f"plain decoding was expected to be faster{late}"


def reasons(data: LogData) -> Counter[str]:
    """Request-steps by what became of their draft."""
    rows = data.rows
    left = np.ones(rows.step.size, dtype=np.bool_)
    found: Counter[str] = Counter()

    def take(name: str, which: Flags) -> None:
        found[name] += int((which & left).sum())
        left[which] = False

    take(DRAFTED, rows.verified > 0)
    take(TRIMMED, rows.drafted > 0)
    take(NOTHING, rows.granted > 0)
    take(REQUESTED_OFF, rows.requested_max == 0)
    take(NO_ROOM, rows.room == 0)
    take(HOST, rows.planned > 0)
    for step in rows.step[left & (rows.planned != UNKNOWN)]:
        why = _why_plain(data, int(step))
        found[f"{POLICY}: {why}" if why else POLICY] += 1
    found["not known"] += int((left & (rows.planned == UNKNOWN)).sum())
    return +found


def _why_plain(data: LogData, step: int) -> str:
    """Why the policy drafted nothing for one request of a step."""
    if not data.reasons[step]:
        if data.modes[step] == "probe_plain":
            return "a probe of plain decoding"
        if data.modes[step] in ("speculate", "probe_draft"):
            return "a draft for this request was not expected to pay"
    return step_reason(data, step)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to have decoded the same tokens."""

    name: str
    length: int | None
    """Draft length; None for the policy itself and the oracle."""
    tokens_per_s: float
    tokens_per_request_step: float
    """Emitted by a request in a step."""
    drafted_per_token: float
    """Drafted for each token of output."""
    extrapolated: float
    """Share of the emitted tokens that no verdict in the log speaks for."""


@dataclass(frozen=True, slots=True)
class _Imagined:
    """Work [S] and tokens, if all recorded steps were taken in another way."""

    work: StepWork
    emitted: float
    drafted: float
    extrapolated: float


def alternatives(data: LogData, costs: LogCosts) -> list[Alternative]:
    """Plain decoding, fixed lengths that the host can run, the oracle, the policy itself.

    All are priced by ``costs``, the policy itself too, so that they compare; empty without decoding steps. Without
    a tested token nothing is known of drafts, and only the policy and plain decoding are there.
    """
    if not data.rows.step.size:
        return []
    lengths = [k for k in data.limits.draft_lens if _tried(k)] if data.verdicts.position.size else []
    known, guessed = _survival(data, max(lengths, default=0))
    own = _Imagined(recorded_work(data), float(data.rows.emitted.sum()), float(data.rows.drafted.sum()), 0.0)
    found = [_alternative("plain decoding", 0, data, costs, _fixed(data, known, guessed, 0))]
    found.extend(_alternative(f"fixed {k}", k, data, costs, _fixed(data, known, guessed, k)) for k in lengths)
    if lengths:
        found.append(_alternative("oracle", None, data, costs, _oracle(data, known, guessed)))
    found.append(_alternative("this policy", None, data, costs, own))
    return found


def _tried(length: int) -> bool:
    """All short lengths, and some longer ones."""
    return 0 < length <= LONGEST and (length <= 8 or length % 4 == 0)


def _survival(data: LogData, longest: int) -> tuple[Floats, Floats]:
    """[N, longest] twice: the chance that a draft is right up to each position, and the part of it that is a guess.

    Accepted tokens are certain, what follows a rejection is impossible, and the rest is the product of what was learnt.
    """
    rows, slots = data.rows, np.arange(longest)
    conditional = chances(learn_acceptance(data.verdicts, len(data.requests)), rows.request, longest)
    right = slots[None, :] < rows.accepted[:, None]
    conditional[right] = 1.0
    conditional[~right & rows.closed[:, None]] = 0.0
    survival = np.cumprod(conditional, axis=1, dtype=np.float64)
    guessed: Floats = np.where(right, 0.0, survival)
    return survival, guessed


def _most(data: LogData, longest: int) -> Floats:
    """[N] drafts that each request could have used, as far as it is known."""
    rows = data.rows
    most = np.full(rows.step.size, float(longest))
    for cap in (rows.room, rows.requested_max, rows.offer):
        most = np.where(cap == UNKNOWN, most, np.minimum(most, cap))
    return most


def _fixed(data: LogData, survival: Floats, guessed: Floats, length: int) -> _Imagined:
    depth = _most(data, length)
    mask = np.arange(survival.shape[1])[None, :] < depth[:, None]
    passes = _largest(data, depth)
    return _imagined(
        data, depth, np.minimum(passes, 1.0), passes, float((survival * mask).sum()), float((guessed * mask).sum())
    )


def _oracle(data: LogData, survival: Floats, guessed: Floats) -> _Imagined:
    """Drafts exactly as far as the target agrees; with chances instead of certainties, expected counts."""
    longest = survival.shape[1]
    mask = np.arange(longest)[None, :] < _most(data, longest)[:, None]
    survival, guessed = survival * mask, guessed * mask
    nobody = np.ones((data.steps.number.size, longest))
    np.multiply.at(nobody, data.rows.step, 1 - survival)
    passes = 1 - nobody
    return _imagined(
        data, survival.sum(axis=1), passes[:, 0], passes.sum(axis=1), float(survival.sum()), float(guessed.sum())
    )


def _imagined(data: LogData, depth: Floats, drafts: Floats, passes: Floats, right: float, guessed: float) -> _Imagined:
    """
    Args:
        depth: [N] tokens drafted and verified.
        drafts: [S] chance that anything is drafted.
        passes: [S] passes of an autoregressive drafter.
        right: drafted tokens accepted.
    """
    rows, done = data.rows, recorded_work(data)
    size = data.steps.number.size
    kind, none = _passes_per_draft(data), np.zeros(size)
    drawn = {"none": none, "one": _summed(data, depth > 0), "per_token": _summed(data, depth)}[kind]
    # Besides one row a token, drafters take in what they have not seen: as often as they did.
    before = float(done.drawn.sum())
    read_in = float(done.read_in.sum()) / before if before and kind == "per_token" else 0.0
    work = StepWork(
        verify_rows=_summed(data, np.ones_like(depth)) + _summed(data, depth),
        prefill_rows=done.prefill_rows,
        kv_read=done.kv_read,
        kv_tokens=(done.kv_tokens + _summed(data, (depth - rows.verified) * rows.context)).clip(min=0),
        # Where a model has drafted as well, its drafts are priced, and lookups beside it are free.
        drafts=none if kind == "none" and done.passes.any() else drafts,
        passes={"none": none, "one": drafts, "per_token": passes}[kind],
        drawn=drawn,
        read_in=read_in * drawn,
    )
    emitted = rows.step.size + right
    return _Imagined(work, emitted, float(depth.sum()), guessed / emitted)


def _alternative(name: str, length: int | None, data: LogData, costs: LogCosts, imagined: _Imagined) -> Alternative:
    """For the tokens that were emitted: fewer or more decoding steps, and the same prefill."""
    decoding = data.steps.requests > 0
    without = replace(imagined.work, prefill_rows=np.zeros(decoding.size))
    seconds = float(costs.price(imagined.work).sum())
    decoded = float(costs.price(without)[decoding].sum())
    tokens = float(data.rows.emitted.sum())
    total = seconds - decoded + decoded * tokens / imagined.emitted
    return Alternative(
        name=name,
        length=length,
        tokens_per_s=tokens / total if total > 0 else 0.0,
        tokens_per_request_step=imagined.emitted / data.rows.step.size,
        drafted_per_token=imagined.drafted / imagined.emitted,
        extrapolated=imagined.extrapolated,
    )


def _passes_per_draft(data: LogData) -> str:
    """Of the proposer used most."""
    index, proposers = most_used_proposer(data), data.limits.proposers
    return proposers[index].passes_per_draft if index < len(proposers) else "per_token"


def _summed(data: LogData, column: Floats | Flags) -> Floats:
    """[N] → [S]"""
    return np.bincount(data.rows.step, weights=column, minlength=data.steps.number.size).astype(np.float64)


def _largest(data: LogData, column: Floats) -> Floats:
    """[N] → [S]"""
    largest = np.zeros(data.steps.number.size)
    np.maximum.at(largest, data.rows.step, column)
    return largest
