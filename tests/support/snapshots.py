"""Snapshots of engines that were never there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynaspec.observe.counts import STEP_S, WAIT_S, Histogram, HistogramCounts, SpecCounts
from dynaspec.observe.stats import EngineSnapshot, RequestMeter, StepMeter


def histogram(bounds: tuple[float, ...], values: Sequence[float]) -> HistogramCounts:
    """The counts of these values."""
    made = Histogram(bounds)
    for value in values:
        made.observe(value)
    return made.snapshot()


def snapshot(
    counts: SpecCounts | None = None,
    *,
    generated: int = 0,
    first_token_s: Sequence[float] = (),
    inter_token_s: Sequence[float] = (),
    goodput: float | None = None,
    **fields: Any,
) -> EngineSnapshot:
    """An engine that is idle but for what is said."""
    given = {"running": 0, "waiting": 0, "kv_blocks": 100, "kv_blocks_used": 0, "policy": "auto"} | fields
    totals = replace(
        RequestMeter().snapshot(),
        generation_tokens=generated,
        first_token_s=histogram(WAIT_S, first_token_s),
        inter_token_s=histogram(STEP_S, inter_token_s),
    )
    steps = replace(StepMeter().snapshot(), recent_goodput=goodput)
    return EngineSnapshot(counts=counts or SpecCounts(), totals=totals, steps=steps, **given)
