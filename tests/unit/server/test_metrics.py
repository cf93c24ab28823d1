from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.types import Receive, Scope, Send

from dynaspec import AsyncLLM
from dynaspec.server.app import create_app
from dynaspec.server.middleware import Admission, Exchanges, HttpMetrics
from dynaspec.server.state import ServerState
from support.asgi import exchange
from support.checkpoints import Pair
from unit.server.serving import MODEL, make_state

COMPLETIONS = "/v1/completions"


class Server:
    """An app, asked without a network."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        app: FastAPI = create_app(state)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post(COMPLETIONS, json={"prompt": "a prompt", "max_tokens": 6, **body})

    async def scrape(self, namespace: str = "dynaspec") -> Mapping[tuple[str, ...], float]:
        """(name, label values in the order of their names) → value; every sample must carry the model's name."""
        response = await self.http.get("/metrics")
        assert response.status_code == 200
        found = {}
        for family in parse_text(response.text):
            assert family.name.startswith(f"{namespace}:")
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == MODEL
                name = sample.name.removeprefix(f"{namespace}:")
                found[name, *(labels[key] for key in sorted(labels))] = sample.value
        return found


@pytest.fixture
async def server(llm: AsyncLLM) -> AsyncIterator[Server]:
    one = Server(make_state(llm))
    yield one
    await one.http.aclose()


def delta(after: Mapping[tuple[str, ...], float], before: Mapping[tuple[str, ...], float], *key: str) -> float:
    return after[key] - before.get(key, 0.0)


async def test_a_request_is_seen(server: Server) -> None:
    before = await server.scrape()
    answer = (await server.complete(temperature=0, ignore_eos=True)).json()
    after = await server.scrape()
    usage = answer["usage"]
    assert delta(after, before, "prompt_tokens_total") == usage["prompt_tokens"]
    assert delta(after, before, "generation_tokens_total") == usage["completion_tokens"] == 6
    assert delta(after, before, "request_success_total", "length") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert delta(after, before, f"{name}_count") == 1
    assert delta(after, before, "spec_decode_num_drafts_total") > 0
    assert delta(after, before, "http_requests_total", "POST", COMPLETIONS, "200") == 1
    assert after["engine_up",] == 1
    assert after["proposer_enabled", "draft_model"] == 1
    assert after["engine_info", "constant"] == 1


async def test_both_formats_can_be_read(server: Server) -> None:
    text = await server.http.get("/metrics")
    openmetrics = await server.http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = [family.name for family in parse_openmetrics(openmetrics.text)]
    assert names == [family.name for family in parse_text(text.text)]
    assert len(set(names)) == len(names)


async def test_vllms_namespace(llm: AsyncLLM) -> None:
    found = await Server(make_state(llm, metrics_namespace="vllm")).scrape("vllm")
    assert {("num_requests_running",), ("generation_tokens_total",), ("spec_decode_num_drafts_total",)} <= found.keys()


async def test_an_engine_that_has_stopped(tiny: Pair) -> None:
    llm = AsyncLLM(tiny.target, max_num_seqs=2)
    server = Server(make_state(llm))
    assert (await server.scrape())["engine_up",] == 1
    await asyncio.to_thread(llm.close)
    assert (await server.complete()).status_code == 503
    found = await server.scrape()
    assert found["engine_up",] == 0
    assert found["http_requests_total", "POST", COMPLETIONS, "503"] == 1
    assert ("num_requests_running",) not in found


async def test_refused_requests_are_counted(llm: AsyncLLM) -> None:
    state = make_state(llm)
    full = ServerState(state.llm, state.config, Admission(1, 0), state.served_names, state.started_at)
    server = Server(full)
    async with full.admission.slot():
        assert (await server.complete()).status_code == 503
        found = await server.scrape()
    assert found["http_requests_rejected_total",] == 1
    assert found["num_requests_admitted",] == 1
    assert (await server.scrape())["num_requests_admitted",] == 0


async def test_labels_stay_few_whatever_is_asked(llm: AsyncLLM) -> None:
    server = Server(make_state(llm))
    for path in ("/v1/nothing", "/etc/passwd", "/v1/completions/", "/v2?%22=1"):
        assert (await server.http.get(path)).status_code == 404
    await server.http.request("BREW", "/health")
    await server.http.get("/dashboard/static/favicon.svg")
    await server.http.get("/dashboard/static/no/such/file")
    found = [key[1:] for key in await server.scrape() if key[0] == "http_requests_total"]
    assert sorted(found) == [
        ("GET", "/dashboard/static/{path:path}", "200"),
        ("GET", "/dashboard/static/{path:path}", "404"),
        ("GET", "other", "404"),
        ("other", "/health", "405"),
    ]


async def test_clients_that_leave_early() -> None:
    metrics, seen = HttpMetrics(), []

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(metrics.in_flight)

    await exchange(Exchanges(silent, metrics=metrics, access_log=False, quote=False), leaves=True)
    assert (seen, metrics.in_flight) == ([1], 0)
    assert dict(metrics.requests) == {("GET", "other", "499"): 1}


async def test_failures_of_the_server(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(make_state(llm))

    async def broken(self: AsyncLLM) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(AsyncLLM, "snapshot", broken)
        assert (await server.http.get("/metrics")).status_code == 500
    assert (await server.scrape())["http_requests_total", "GET", "/metrics", "500"] == 1
