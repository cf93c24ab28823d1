"""The result of a load test as JSON. Keys are those of ``vllm bench serve`` where it has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from dynaspec.bench.provenance import provenance

from .acceptance import drafts_by_category, total_drafts
from .remarks import remarks
from .requests import data_set_name
from .run import Finished

KIND = "serve"
SCHEMA = 1
"""Grows when a key changes its meaning."""


def as_document(
    finished: Finished, *, label: str | None = None, metadata: Mapping[str, str] | None = None
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


def figures(finished: Finished) -> dict[str, Any]:
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
    return found | _times(finished) | _counters(finished) | _drafts(finished)


def details(finished: Finished) -> dict[str, Any]:
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


def result_name(finished: Finished, label: str | None) -> str:
    """The file's usual name, which is vLLM's."""
    traffic = finished.settings.traffic
    rate = "inf" if math.isinf(traffic.request_rate) else f"{traffic.request_rate:g}"
    concurrency = f"-concurrency{traffic.max_concurrency}" if traffic.max_concurrency is not None else ""
    model = finished.served.name.rstrip("/").rpartition("/")[2]
    return f"{label or finished.settings.target.backend}-{rate}qps{concurrency}-{model}-{_now()}.json"


def percentile_key(percentile: float, name: str) -> str:
    """``p99_ttft_ms``, ``p99.9_ttft_ms``."""
    return f"p{percentile:g}_{name}_ms"


def _setup(finished: Finished, label: str | None) -> dict[str, Any]:
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


def _settings(finished: Finished) -> dict[str, Any]:
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


def _times(finished: Finished) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, spread in finished.measured.spreads.items():
        found |= {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
        found |= {percentile_key(percentile, name): value for percentile, value in spread.percentiles.items()}
    return found


def _counters(finished: Finished) -> dict[str, Any]:
    """The server's own counts of the time of the load; nothing where it has none or drafted nothing."""
    counters = finished.counters
    if counters is None or not counters.draft_tokens:
        return {}
    rate = counters.acceptance_rate
    return {
        "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
        "spec_decode_acceptance_length": counters.acceptance_length,
        "spec_decode_num_drafts": counters.drafts,
        "spec_decode_draft_tokens": counters.draft_tokens,
        "spec_decode_accepted_tokens": counters.accepted_tokens,
        "spec_decode_per_position_acceptance_rates": counters.rates_per_position,
    }


def _drafts(finished: Finished) -> dict[str, Any]:
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
