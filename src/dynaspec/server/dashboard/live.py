"""What the page is sent. While somebody watches, an engine is looked at once a second; ten minutes are remembered.

What happened between two looks is a point of the charts. Ratios are of counts.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any, Literal

from pydantic_core import to_json

from dynaspec.contract.errors import DynaspecError
from dynaspec.observe.counts import HistogramCounts, SpecCounts
from dynaspec.observe.estimates import ProposerEstimates, read_estimates
from dynaspec.observe.stats import EngineSnapshot

from .decision import explain

_MINUTE_S = 60.0
_RECENT_S = 5.0
_SHOWN_REQUESTS = 50
_DIGITS = 5
"""Significant ones of all numbers but times; ten minutes of points are sent at once."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot and when it was taken, in unix seconds."""

    at: float
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One second of the charts. None: nothing happened that could be measured, or the policy does not say."""

    t: float
    """Unix seconds."""
    emitted_per_s: float
    accepted_per_s: float
    """Of the emitted tokens, those that a drafter wrote; the others are the target's own."""
    acceptance_length: float | None
    """Tokens emitted per draft, the target's own included."""
    acceptance_rate: float | None
    """Accepted / drafted."""
    draft_length: float | None
    """Tokens drafted per draft."""
    accepted_length: float | None
    """Drafted tokens accepted per draft."""
    step_ms: float | None
    draft_ms: float | None
    verify_ms: float | None
    busy: float
    """Share of the time in which the engine was stepping."""
    running: int
    waiting: int
    ttft_p50_ms: float | None
    """Arrival to first token, over the last minute; the others alike."""
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    """Between two outputs of a request, each of which may bring several tokens."""
    itl_p95_ms: float | None
    plain_per_s: float | None
    """Tokens/s that the controller expects of plain decoding."""
    drafting_per_s: float | None
    """The same with drafts."""
    measured_per_s: float | None
    """Tokens per second of steps that decode alone, which is what the two are to be held against."""


def point(minute: Sequence[Moment]) -> Point:
    """The point at the last moment.

    Args:
        minute: the moments of the last minute, in order; two at least.
    """
    before, now = minute[-2], minute[-1]
    snapshot, totals, seconds = now.snapshot, now.snapshot.totals, now.at - before.at
    counts = snapshot.counts - before.snapshot.counts
    emitted = totals.generation_tokens - before.snapshot.totals.generation_tokens
    then = minute[0].snapshot.totals
    ttft, itl = totals.first_token_s - then.first_token_s, totals.inter_token_s - then.inter_token_s
    decision = explain(snapshot, counts)
    return Point(
        t=round(now.at, 3),
        emitted_per_s=emitted / seconds,
        accepted_per_s=min(counts.accepted, emitted) / seconds,  # a request may have ended inside its accepted run
        acceptance_length=counts.mean_acceptance_length,
        acceptance_rate=counts.draft_acceptance_rate,
        draft_length=_per_draft(counts.draft_tokens, counts),
        accepted_length=_per_draft(counts.accepted, counts),
        step_ms=_per_step_ms(counts.step_s, counts),
        draft_ms=_per_step_ms(counts.draft_s, counts),
        verify_ms=_per_step_ms(counts.verify_s, counts),
        busy=min(1.0, counts.step_s / seconds),
        running=snapshot.running,
        waiting=snapshot.waiting,
        ttft_p50_ms=_quantile_ms(ttft, 0.5),
        ttft_p95_ms=_quantile_ms(ttft, 0.95),
        itl_p50_ms=_quantile_ms(itl, 0.5),
        itl_p95_ms=_quantile_ms(itl, 0.95),
        plain_per_s=decision.plain_per_s,
        drafting_per_s=decision.drafting_per_s,
        measured_per_s=decision.measured_per_s if counts.steps else None,
    )


def _per_draft(tokens: int, counts: SpecCounts) -> float | None:
    return tokens / counts.drafts if counts.drafts else None


def _per_step_ms(seconds: float, counts: SpecCounts) -> float | None:
    return 1e3 * seconds / counts.steps if counts.steps else None


def _quantile_ms(seconds: HistogramCounts, q: float) -> float | None:
    found = seconds.quantile(q)
    return None if found is None else 1e3 * found


@dataclass(frozen=True, slots=True)
class Update:
    """What a watcher has not seen yet."""

    points: tuple[Point, ...]
    """In order; the first update of a watcher has all that are remembered."""
    minute: tuple[Moment, ...]
    """The moments of the last minute, in order; the last is now. Empty if the engine has stopped."""
    stopped: str | None = None
    """Why the engine has stopped."""


class LiveFeed:
    """One for an engine, for any number of watchers; belongs to one event loop. It has no task of its own: the first
    watcher to find that the latest look has grown old takes the next one for all.

    Args:
        take: a snapshot of the engine; raises ``DynaspecError`` once it has stopped.
        interval_s: seconds between two looks.
        keep_s: seconds of points that are remembered.
        clock: unix seconds, to stamp what is seen.
    """

    def __init__(
        self,
        take: Callable[[], Awaitable[EngineSnapshot]],
        *,
        interval_s: float = 1.0,
        keep_s: float = 600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._take = take
        self._interval_s = interval_s
        self._clock = clock
        self._looking = asyncio.Lock()
        self._watchers = 0
        self._points: deque[Point] = deque(maxlen=max(1, round(keep_s / interval_s)))
        self._drawn = 0
        """Points made since the start, forgotten ones too."""
        self._minute: deque[Moment] = deque()
        self._stopped: str | None = None
        self._due = 0.0

    async def follow(self) -> AsyncGenerator[Update, None]:
        """What is there, then an update a look. Never ends by itself; whoever leaves closes it."""
        if not self._watchers:
            self._minute.clear()  # nobody knows what happened when since then
            self._due = 0.0
        self._watchers += 1
        seen = max(0, self._drawn - len(self._points))
        try:
            while True:
                await self._look()
                new = self._drawn - seen
                seen = self._drawn
                points = tuple(self._points)[-new:] if new else ()
                yield Update(points, tuple(self._minute), self._stopped)
                await asyncio.sleep(self._due - time.monotonic())
        finally:
            self._watchers -= 1

    async def _look(self) -> None:
        """Takes a snapshot, unless another watcher has just done so."""
        async with self._looking:
            if time.monotonic() < self._due:
                return
            try:
                snapshot = await self._take()
            except DynaspecError as error:
                self._minute.clear()
                self._stopped = str(error)
            else:
                self._remember(Moment(self._clock(), snapshot))
            self._due = time.monotonic() + self._interval_s

    def _remember(self, now: Moment) -> None:
        minute = self._minute
        while minute and now.at - minute[0].at > _MINUTE_S:
            minute.popleft()
        minute.append(now)
        if len(minute) > 1 and now.at > minute[-2].at:
            self._points.append(point(minute))
            self._drawn += 1


State = Literal["idle", "serving", "draining", "stopped"]

_NAMES = tuple(field.name for field in fields(Point))
_ROW = attrgetter(*_NAMES)


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
