"""How the scheduler's numbers reach the process that serves ``/metrics``.

vLLM sends its ``SchedulerStats`` there with every step's outputs, and has no field for anybody else's. One of its
fields is a mapping of names to counts of which it reads the names that it knows, so one more name passes unread. That
name is the report as JSON text, behind a prefix; its count is 0, so that no sum changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dynaspec.observe.counts import SpecCounts

FIELD = "num_kv_fetch_reqs_by_stage"
"""Of ``SchedulerStats``."""
_PREFIX = "dynaspec:"
_ESTIMATES = ("mode", "expected_tokens", "expected_step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the scheduler has counted since it was built, and what it does now."""

    policy: str
    longest: int
    """Most tokens that may be drafted at once."""
    k: int
    """Draft length of the latest step."""
    deciding: bool
    """False: a fault has handed all decisions back to vLLM."""
    running: int
    """Requests."""
    goodput: float | None
    """Tokens a second of the latest steps."""
    estimates: Mapping[str, Any] = field(default_factory=dict)
    """The controller's, as far as metrics show them."""
    counts: SpecCounts = field(default_factory=SpecCounts)


def shown(estimates: Mapping[str, Any]) -> dict[str, Any]:
    """The estimates that metrics show."""
    return {name: estimates[name] for name in _ESTIMATES if name in estimates}


def put(report: Report, stats: Any) -> None:
    """Adds a report to vLLM's ``SchedulerStats``."""
    getattr(stats, FIELD)[_PREFIX + json.dumps(asdict(report), separators=(",", ":"))] = 0


def take(stats: Any) -> Report | None:
    """The report in vLLM's ``SchedulerStats``, which is taken out; None if there is none."""
    carrier: dict[str, int] = getattr(stats, FIELD, {})
    name = next((name for name in carrier if name.startswith(_PREFIX)), None)
    if name is None:
        return None
    del carrier[name]
    values = json.loads(name.removeprefix(_PREFIX))
    counts: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values["counts"].items()
    }
    return Report(**{**values, "counts": SpecCounts(**counts)})
