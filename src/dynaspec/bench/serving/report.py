"""A load test's result as JSON and as tables, with what a reader of the figures must know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynaspec.bench.provenance import provenance
from dynaspec.result_output import new_table

from .load import FinishedLoad
from .results import LoadFigures, Spread, drafts_by_category, total_drafts
from .workload import data_set_name

_BUSY = 0.8
"""Share of a processor from which on the client may hold the server up."""
_LATE_S = 0.05
"""A request sent later than this was not sent when its rate asked for."""
KIND = "serve"
SCHEMA = 1
"""Grows when a key changes its meaning."""
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


def remarks(finished: FinishedLoad) -> list[str]:
    """One sentence each; empty if there is nothing to say."""
    return [*_of_prompts(finished), *_of_answers(finished), *_of_client(finished)]


def _of_prompts(finished: FinishedLoad) -> list[str]:
    fitted, found = finished.fitted, []
    total = len(fitted.requests)
    if fitted.cut:
        length = finished.served.max_model_len
        found.append(f"{fitted.cut} of {total} prompts did not fit into {length} tokens and lost their beginning")
    if fitted.unchecked:
        found.append("prompts were not checked for length: the server does not say its tokens or its longest context")
    repeated = total - len({asked.prompt for asked in fitted.requests})
    if repeated:
        found.append(f"{repeated} of {total} prompts were sent before in this run; a prefix cache makes them cheap")
    return found


def _of_answers(finished: FinishedLoad) -> list[str]:
    done = [record for record in finished.load.records if record.failure is None]
    found = []
    uncounted = sum(record.usage is None for record in done)
    if uncounted:
        how = "the tokenizer counted their text" if finished.settings.tokenizer else "every chunk counts as one token"
        found.append(f"{uncounted} answers came without usage: {how}, and their prompts are not counted")
    whole = sum(not record.streamed for record in done)
    if whole:
        found.append(f"{whole} answers were not streamed: their time to the first token is all of their time")
    return found


def _of_client(finished: FinishedLoad) -> list[str]:
    load, found = finished.load, []
    share = load.client_cpu_s / load.duration_s
    if share > _BUSY:
        found.append(f"the client was busy {share:.0%} of the time and may have held the server up")
    if not math.isinf(finished.settings.traffic.request_rate) and load.send_lag_s > _LATE_S:
        found.append(f"a request was sent {1e3 * load.send_lag_s:.0f} ms late: the machine was busy")
    return found


def as_document(
    finished: FinishedLoad, *, label: str | None = None, metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Everything but the single requests.

    Args:
        metadata: goes under ``metadata``, and beside the other keys where there is none of that name.
    """
    return (
        dict(metadata or {})
        | _setup(finished, label)
        | figures(finished)
        | {
            "failures": [
                {"kind": failure.kind, "count": count, "example": failure.message}
                for failure, count in finished.measured.failure_kinds
            ],
            "remarks": remarks(finished),
            "settings": _settings(finished),
            "metadata": dict(metadata or {}),
            "server": asdict(finished.served) | {"url": finished.settings.target.url},
            "provenance": provenance(),
        }
    )


def figures(finished: FinishedLoad) -> dict[str, Any]:
    """What was measured."""
    measured, load = finished.measured, finished.load
    tokens = measured.input_tokens + measured.output_tokens
    found: dict[str, Any] = {
        "duration": measured.duration_s,
        "completed": measured.completed,
        "failed": len(measured.failures),
        "total_input_tokens": measured.input_tokens,
        "total_cached_tokens": measured.cached_tokens,
        "total_output_tokens": measured.output_tokens,
        "request_throughput": measured.per_second(measured.completed),
        "request_goodput": None if measured.good is None else measured.per_second(measured.good),
        "output_throughput": measured.per_second(measured.output_tokens),
        "total_token_throughput": measured.per_second(tokens),
        "max_output_tokens_per_s": measured.peak_tokens_per_s,
        "max_concurrent_requests": measured.peak_requests,
        "client_cpu_seconds": load.client_cpu_s,
        "client_cpu_share": load.client_cpu_s / load.duration_s,
        "max_send_lag_ms": 1e3 * load.send_lag_s,
    }
    return found | _times_in_ms(finished) | _counter_figures(finished) | _draft_figures(finished)


def details(finished: FinishedLoad) -> dict[str, Any]:
    """A value for every request, in the order of the requests; seconds, as vLLM has them."""
    records = finished.load.records
    first = min(record.start_s for record in records)
    done = [record.failure is None for record in records]
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens if ok else 0 for ok, record in zip(done, records, strict=True)],
        "start_times": [record.start_s - first for record in records],
        "ttfts": [record.ttft_s if ok else 0.0 for ok, record in zip(done, records, strict=True)],
        "itls": [list(record.itl_s) for record in records],
        "latencies": [record.e2el_s if ok else 0.0 for ok, record in zip(done, records, strict=True)],
        "queue_times": [record.queued_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": ["" if r.failure is None else f"{r.failure.kind}: {r.failure.message}" for r in records],
        "speculation": [None if r.speculation is None else dict(r.speculation) for r in records],
    }


def result_name(finished: FinishedLoad, label: str | None) -> str:
    """The file's usual name, which is vLLM's."""
    traffic = finished.settings.traffic
    rate = "inf" if math.isinf(traffic.request_rate) else f"{traffic.request_rate:g}"
    concurrency = f"-concurrency{traffic.max_concurrency}" if traffic.max_concurrency is not None else ""
    model = finished.served.name.rstrip("/").rpartition("/")[2]
    return f"{label or finished.settings.target.backend}-{rate}qps{concurrency}-{model}-{_now()}.json"


def _setup(finished: FinishedLoad, label: str | None) -> dict[str, Any]:
    target, traffic = finished.settings.target, finished.settings.traffic
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "date": _now(),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": label,
        "model_id": finished.served.name,
        "tokenizer_id": finished.settings.tokenizer,
        "num_prompts": len(finished.fitted.requests),
        "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
    }


def _settings(finished: FinishedLoad) -> dict[str, Any]:
    """What else decides the figures."""
    workload = finished.settings.workload
    own = asdict(workload) | {
        "dataset_name": data_set_name(workload),
        "dataset_path": None if workload.dataset_path is None else str(workload.dataset_path),
    }
    return own | {
        "num_warmups": finished.settings.traffic.num_warmups,
        "prompts_cut": finished.fitted.cut,
        "fields": dict(finished.settings.fields),
        "goodput": dict(finished.settings.reported.goals_ms),
    }


def _times_in_ms(finished: FinishedLoad) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, spread in finished.measured.spreads.items():
        found |= {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
        found |= {f"p{percentile:g}_{name}_ms": value for percentile, value in spread.percentiles.items()}
    return found


def _counter_figures(finished: FinishedLoad) -> dict[str, Any]:
    """The server's own counts of the time of the load; nothing where it has none or drafted nothing."""
    counters = finished.counters
    if counters is None or not counters.draft_tokens:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * counters.accepted / counters.draft_tokens,
        "spec_decode_acceptance_length": counters.mean_acceptance_length,
        "spec_decode_num_drafts": counters.drafts,
        "spec_decode_draft_tokens": counters.draft_tokens,
        "spec_decode_accepted_tokens": counters.accepted,
        "spec_decode_per_position_acceptance_rates": list(counters.rate_per_position),
    }


def _draft_figures(finished: FinishedLoad) -> dict[str, Any]:
    """What answers said of their drafts; nothing where none did."""
    records = finished.load.records
    total = total_drafts(records)
    if not total.requests:
        return {}
    categories = [asked.category for asked in finished.fitted.requests]
    by_category = {name: drafts.as_dict() for name, drafts in drafts_by_category(records, categories).items()}
    return {"request_speculation": total.as_dict() | {"by_category": by_category}}


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def as_report(finished: FinishedLoad) -> RenderableType:
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


def _throughput(finished: FinishedLoad) -> Table:
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


def _times(measured: LoadFigures) -> Table:
    """A time a line, in milliseconds."""
    rows = {name: _columns(spread) for name, spread in measured.spreads.items()}
    table = new_table("Milliseconds", ("time", *next(iter(rows.values()))), left=("time",))
    for name, columns in rows.items():
        table.add_row(_NAMES[name], *("-" if value is None else f"{value:.2f}" for value in columns.values()))
    return table


def _columns(spread: Spread) -> dict[str, float | None]:
    """Column → value; the 50th percentile is the median."""
    percentiles = {"median" if p == 50 else f"p{p:g}": value for p, value in spread.percentiles.items()}
    return {"mean": spread.mean, "std": spread.std, "median": spread.median} | percentiles


def _speculation(finished: FinishedLoad) -> list[tuple[str, str]]:
    facts = []
    counters = finished.counters
    if counters is not None and counters.draft_tokens:
        facts += [
            ("acceptance length", f"{counters.mean_acceptance_length:.2f} tokens a draft"),
            ("accepted", f"{_percent(counters.draft_acceptance_rate)} of {counters.draft_tokens} drafted tokens"),
            ("by position", _rates(counters.rate_per_position)),
        ]
    total = total_drafts(finished.load.records)
    if total.drafted:
        rate = f"{_percent(total.acceptance_rate)} of {total.drafted} drafted tokens"
        facts.append((f"{total.requests} answers say", f"{rate}, {total.tokens_per_step:.2f} tokens a step"))
    return facts


def _failures(measured: LoadFigures) -> Table:
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
    shown = " ".join(f"{rate:.2f}" for rate in rates[:_SHOWN_POSITIONS])
    return (shown + " …" if len(rates) > _SHOWN_POSITIONS else shown) or "-"
