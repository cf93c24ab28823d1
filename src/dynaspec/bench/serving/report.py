"""A load test as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .acceptance import total_drafts
from .measures import Measured, Spread
from .remarks import remarks
from .run import Finished

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two chunks",
    "e2el": "end to end",
    "client_queue_time": "queued in the client",
    "e2el_including_client_queue": "end to end, queue included",
}
_SHOWN_FAILURES = 10
_SHOWN_POSITIONS = 8


def as_report(finished: Finished) -> RenderableType:
    """Throughput, times, speculation, failures and remarks."""
    parts: list[RenderableType] = [_throughput(finished)]
    if finished.measured.completed and finished.measured.spreads:
        parts.append(_times(finished.measured))
    speculation = _speculation(finished)
    if speculation:
        parts.append(_facts("Speculation", speculation))
    if finished.measured.failures:
        parts.append(_failures(finished.measured))
    parts += [Text(f"note: {remark}", style="dim") for remark in remarks(finished)]
    return Group(*parts)


def _throughput(finished: Finished) -> Table:
    measured, load = finished.measured, finished.load
    traffic = finished.settings.traffic
    rate = "all at once" if math.isinf(traffic.request_rate) else f"{traffic.request_rate:g} a second"
    limit = "no limit" if traffic.max_concurrency is None else f"at most {traffic.max_concurrency}"
    cached = f" ({measured.cached_tokens} from the prefix cache)" if measured.cached_tokens else ""
    facts = [
        ("requests", f"{measured.completed} of {len(load.records)} successful"),
        ("offered", f"{rate}, {limit} under way (peak {measured.peak_requests})"),
        ("duration", f"{measured.duration_s:.2f} s"),
        ("input tokens", f"{measured.input_tokens}{cached}"),
        ("output tokens", f"{measured.output_tokens}"),
        ("requests/s", f"{measured.per_second(measured.completed):.2f}"),
        (
            "output tokens/s",
            f"{measured.per_second(measured.output_tokens):.1f} (peak {measured.peak_tokens_per_s:.0f})",
        ),
        ("total tokens/s", f"{measured.per_second(measured.input_tokens + measured.output_tokens):.1f}"),
    ]
    if measured.good is not None:
        goals = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in finished.settings.reported.goals_ms.items())
        facts.append(("goodput", f"{measured.per_second(measured.good):.2f} requests/s ({measured.good} with {goals})"))
    facts.append(("client", f"{load.client_cpu_s:.2f} s of processor time, {load.client_cpu_s / load.duration_s:.0%}"))
    return _facts(f"{finished.served.name} at {finished.settings.target.url}", facts)


def _times(measured: Measured) -> Table:
    """A time a line, in milliseconds."""
    table = Table(box=SIMPLE_HEAD, title="Milliseconds", title_justify="left")
    table.add_column("time", no_wrap=True)
    rows = {name: _columns(spread) for name, spread in measured.spreads.items()}
    for column in next(iter(rows.values())):
        table.add_column(column, justify="right", no_wrap=True)
    for name, columns in rows.items():
        table.add_row(_NAMES[name], *("-" if value is None else f"{value:.2f}" for value in columns.values()))
    return table


def _columns(spread: Spread) -> dict[str, float | None]:
    """Column → value; the 50th percentile is the median."""
    percentiles = {"median" if p == 50 else f"p{p:g}": value for p, value in spread.percentiles.items()}
    return {"mean": spread.mean, "std": spread.std, "median": spread.median} | percentiles


def _speculation(finished: Finished) -> list[tuple[str, str]]:
    facts = []
    counters = finished.counters
    if counters is not None and counters.draft_tokens:
        facts += [
            ("acceptance length", f"{counters.acceptance_length:.2f} tokens a draft"),
            ("accepted", f"{_percent(counters.acceptance_rate)} of {counters.draft_tokens} drafted tokens"),
            ("by position", _rates(counters.rates_per_position)),
        ]
    total = total_drafts(finished.load.records)
    if total.drafted:
        rate = f"{_percent(total.acceptance_rate)} of {total.drafted} drafted tokens"
        facts.append((f"{total.requests} answers say", f"{rate}, {total.tokens_per_step:.2f} tokens a step"))
    return facts


def _failures(measured: Measured) -> Table:
    table = Table(box=SIMPLE_HEAD, title="Failed requests", title_justify="left", title_style="bold red")
    for name, justify in (("number", "right"), ("kind", "left"), ("one of them", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    kinds = measured.failure_kinds
    for failure, count in kinds[:_SHOWN_FAILURES]:
        table.add_row(str(count), Text(failure.kind), Text(failure.message))
    if len(kinds) > _SHOWN_FAILURES:
        rest = sum(count for _, count in kinds[_SHOWN_FAILURES:])
        table.add_row(str(rest), f"{len(kinds) - _SHOWN_FAILURES} other kinds", "")
    return table


def _facts(title: str, facts: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=Text(title, style="bold"), title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _rates(rates: Sequence[float]) -> str:
    """Without positions at the end that no draft has reached."""
    rates = rates[: max((i + 1 for i, rate in enumerate(rates) if rate), default=0)]
    shown = " ".join(f"{rate:.2f}" for rate in rates[:_SHOWN_POSITIONS])
    return (shown + " …" if len(rates) > _SHOWN_POSITIONS else shown) or "-"
