"""What the page is sent: points for its charts, and the state of things now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any, Literal

from pydantic_core import to_json

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.estimates import ProposerEstimates, read_estimates
from dynaspec.observe.snapshot import EngineSnapshot

from ..live import Update
from .decision import explain
from .points import Moment, Point

State = Literal["idle", "serving", "draining", "stopped"]

_SHOWN_REQUESTS = 50
_RECENT_S = 5.0
_NAMES = tuple(field.name for field in fields(Point))
_ROW = attrgetter(*_NAMES)
_DIGITS = 5
"""Significant ones of all numbers but times; ten minutes of points are sent at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the server says of itself."""

    model: str
    version: str
    started_at: int
    """Unix seconds."""


def encode(update: Update, about: About, *, draining: bool) -> bytes:
    """An update as JSON on one line: ``{"points": {name: [value, …], …}, "now": {…}}``."""
    rows = [_ROW(point) for point in update.points]
    columns = {name: [_short(row[i]) for row in rows] for i, name in enumerate(_NAMES)}
    columns["t"] = [point.t for point in update.points]
    now = {
        "model": about.model,
        "version": about.version,
        "started_at": about.started_at,
        "stopped": update.stopped,
        "state": _state(update, draining),
        **(_engine(update.minute) if update.minute else {}),
    }
    return to_json({"points": columns, "now": now}, inf_nan_mode="null")


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _state(update: Update, draining: bool) -> State:
    if update.stopped is not None or not update.minute:
        return "stopped"
    if draining:
        return "draining"
    snapshot = update.minute[-1].snapshot
    return "serving" if snapshot.running or snapshot.waiting or _recent(update.minute).steps else "idle"


def _recent(minute: Sequence[Moment]) -> SpecCounts:
    """What happened in the last seconds."""
    now = minute[-1]
    then = next(moment for moment in minute if now.at - moment.at <= _RECENT_S)
    return now.snapshot.counts - then.snapshot.counts


def _engine(minute: Sequence[Moment]) -> dict[str, Any]:
    now, then = minute[-1], minute[0]
    snapshot, counts = now.snapshot, now.snapshot.counts - then.snapshot.counts
    looked_up = snapshot.prefix_cache_queries
    return {
        "t": now.at,
        "policy": snapshot.policy,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "kv_blocks": snapshot.kv_blocks,
        "kv_blocks_used": snapshot.kv_blocks_used,
        "prefix_hit_rate": snapshot.prefix_cache_hits / looked_up if looked_up else None,
        "generated": snapshot.totals.generation_tokens,
        "finished": sum(snapshot.totals.finished.values()),
        "preemptions": snapshot.counts.preemptions,
        "faults": snapshot.counts.proposer_faults,
        "minute": {
            "seconds": now.at - then.at,
            "drafts": counts.drafts,
            "acceptance_length": counts.mean_acceptance_length,
            "acceptance_rate": counts.draft_acceptance_rate,
            "positions": _positions(counts),
        },
        "decision": asdict(explain(snapshot, _recent(minute))),
        "drafters": _drafters(snapshot),
        "requests": [request._asdict() for request in snapshot.requests[:_SHOWN_REQUESTS]],
        "requests_total": len(snapshot.requests),
    }


def _positions(counts: SpecCounts) -> list[dict[str, float]]:
    """By position, the share of all drafts that had a token there, and the share whose token was accepted."""
    accepted = (*counts.rate_per_position, *(0.0,) * len(counts.drafted_per_pos))
    return [
        {"drafted": drafted / counts.drafts, "accepted": accepted[position]}
        for position, drafted in enumerate(counts.drafted_per_pos)
    ]


def _drafters(snapshot: EngineSnapshot) -> list[dict[str, Any]]:
    """Each proposer's state, and what the controller expects of it where it says so."""
    expected, nothing = read_estimates(snapshot.estimates).proposers, ProposerEstimates()
    return [
        {"name": name, "on": on, "acceptance": found.acceptance, "cost": found.cost}
        for name, on in snapshot.proposers.items()
        for found in (expected.get(name, nothing),)
    ]
