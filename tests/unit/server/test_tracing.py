from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry import trace as global_trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dynaspec import AsyncLLM, SamplingParams
from dynaspec.contract.errors import ConfigError, DynaspecError
from dynaspec.contract.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind
from dynaspec.server.app import create_app
from dynaspec.server.run import open_tracing
from dynaspec.server.state import Tracing
from dynaspec.server.tracing import OtelTracing
from unit.server.serving import MODEL, Client, make_state

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
SECRET = "a most secret prompt"


class Recorded:
    """Tracing into memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = OtelTracing(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def span(self) -> tuple[ReadableSpan, dict[str, Any]]:
        """The only one, and its attributes."""
        [span] = self.spans
        return span, dict(span.attributes or {})


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    one = Recorded()
    yield one
    one.tracing.close()


@pytest.fixture
async def traced(llm: AsyncLLM, recorded: Recorded) -> AsyncIterator[Client]:
    client = Client(create_app(replace(make_state(llm), tracing=recorded.tracing)))
    yield client
    await client.close()


async def test_a_completion(traced: Client, recorded: Recorded) -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "max_tokens": 12}
    answer = await traced.ask("/v1/completions", model="other-name", prompt=SECRET, ignore_eos=True, **settings)
    span, found = recorded.span()
    assert (span.name, span.kind, span.status.status_code) == (
        "text_completion other-name",
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "dynaspec",
        "gen_ai.request.model": "other-name",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert {name: found.get(name) for name in expected} == expected
    assert 0.0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert found["dynaspec.drafts"] > 0
    assert (
        found["dynaspec.draft_acceptance_rate"] == found["dynaspec.accepted_tokens"] / found["dynaspec.drafted_tokens"]
    )
    assert 1.0 <= found["dynaspec.mean_acceptance_length"] <= 4.0


async def test_a_streamed_chat_counts_its_deltas(traced: Client, recorded: Recorded) -> None:
    messages = [{"role": "user", "content": SECRET}]
    await traced.stream("/v1/chat/completions", messages=messages, max_tokens=10, ignore_eos=True, temperature=0)
    span, found = recorded.span()
    assert span.name == f"chat {MODEL}"
    assert found["gen_ai.usage.output_tokens"] == 10
    assert found["gen_ai.request.stream"] is True


async def test_nothing_of_the_text_is_told(traced: Client, recorded: Recorded) -> None:
    answer = await traced.ask("/v1/completions", prompt=SECRET, max_tokens=8, stop=["secret stop"], user="somebody")
    [span] = recorded.spans
    told = span.to_json()
    for text in (SECRET, "secret stop", "somebody", json.dumps(answer["choices"][0]["text"])):
        assert text not in told


async def test_each_prompt_has_a_span(traced: Client, recorded: Recorded) -> None:
    await traced.ask("/v1/completions", prompt=["one", "two"], max_tokens=4, n=2, ignore_eos=True)
    assert [dict(span.attributes or {})["gen_ai.usage.output_tokens"] for span in recorded.spans] == [8, 8]
    assert {dict(span.attributes or {})["gen_ai.request.choice.count"] for span in recorded.spans} == {2}


async def test_the_callers_trace_goes_on(traced: Client, recorded: Recorded) -> None:
    body = json.dumps({"prompt": "one", "max_tokens": 2}).encode()
    await traced.send("/v1/completions", body, traceparent=PARENT)
    span, _ = recorded.span()
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)


@pytest.mark.parametrize("given", ["", "nonsense", PARENT.replace("00-", "ff-", 1)])
async def test_a_broken_parent_is_none(given: str, traced: Client, recorded: Recorded) -> None:
    body = json.dumps({"prompt": "one", "max_tokens": 2}).encode()
    await traced.send("/v1/completions", body, traceparent=given)
    span, _ = recorded.span()
    assert span.parent is None


async def test_a_caller_that_does_not_sample_is_heard(traced: Client, recorded: Recorded) -> None:
    body = json.dumps({"prompt": "one", "max_tokens": 2}).encode()
    await traced.send("/v1/completions", body, traceparent=PARENT[:-1] + "0")
    assert recorded.spans == ()


def output(tokens: int, *, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(
        0, "", (1,) * tokens, finish_reason="stop" if finished else None, metrics=RequestMetrics(arrival_s=5.0)
    )
    return RequestOutput("r", None, (1, 2), (completion,), finished)


class FakeOutputs:
    """An engine's outputs, and whether they were closed."""

    def __init__(self, *outputs: RequestOutput | Exception) -> None:
        self._outputs = outputs
        self.closed = False

    async def __call__(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            for one in self._outputs:
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            self.closed = True


DELTAS = SamplingParams(output_kind=RequestOutputKind.DELTA)


async def test_an_error_is_named_but_not_quoted(recorded: Recorded) -> None:
    outputs = FakeOutputs(output(1), DynaspecError(SECRET))
    trace = recorded.tracing.trace("chat", MODEL, {})
    with pytest.raises(DynaspecError):
        [_ async for _ in trace.follow(outputs(), DELTAS, "r")]
    span, found = recorded.span()
    assert span.status.status_code is StatusCode.ERROR
    assert found["error.type"] == "DynaspecError"
    assert SECRET not in span.to_json()


async def test_who_leaves_early_closes_the_outputs(recorded: Recorded) -> None:
    outputs = FakeOutputs(output(1), output(2), output(3, finished=True))
    following = recorded.tracing.trace("chat", MODEL, {}).follow(outputs(), DELTAS, "r")
    await anext(following)
    await anext(following)
    await following.aclose()
    assert outputs.closed
    span, found = recorded.span()
    assert span.status.status_code is StatusCode.UNSET
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ("abort",)
    assert "gen_ai.latency.time_to_first_token" not in found


async def test_outputs_pass_unchanged(recorded: Recorded) -> None:
    given = (output(1), output(2), output(3, finished=True))
    for tracing in (recorded.tracing, Tracing()):
        trace = tracing.trace("chat", MODEL, {})
        assert tuple([one async for one in trace.follow(FakeOutputs(*given)(), DELTAS, "r")]) == given


async def test_the_global_provider_is_left_alone(recorded: Recorded) -> None:
    before = global_trace.get_tracer_provider()
    OtelTracing(SimpleSpanProcessor(InMemorySpanExporter())).close()
    assert global_trace.get_tracer_provider() is before


@pytest.mark.parametrize("given", [None, "mine"])
async def test_the_service_has_a_name(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if given is not None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", given)
    recorded = Recorded()
    [_ async for _ in recorded.tracing.trace("chat", MODEL, {}).follow(FakeOutputs()(), DELTAS, "r")]
    span, _ = recorded.span()
    assert span.resource.attributes["service.name"] == (given or "dynaspec")
    recorded.tracing.close()


def test_without_an_endpoint_nothing_is_traced() -> None:
    assert type(open_tracing(None)) is Tracing


def test_without_the_extra_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dynaspec.server.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"opentelemetry.sdk.trace is missing.*pip install 'dynaspec\[otel\]'"):
        open_tracing("http://localhost:4318/v1/traces")


class Collector(BaseHTTPRequestHandler):
    """Takes spans as a collector does."""

    received: list[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Is silent."""


async def test_spans_reach_a_collector() -> None:
    received: list[ExportTraceServiceRequest] = []
    handler = type("OneCollector", (Collector,), {"received": received})
    with HTTPServer(("127.0.0.1", 0), handler) as collector:
        serving = Thread(target=collector.serve_forever)
        serving.start()
        tracing = open_tracing(f"http://127.0.0.1:{collector.server_port}/v1/traces")
        outputs = FakeOutputs(output(1, finished=True))
        [_ async for _ in tracing.trace("chat", MODEL, {"traceparent": PARENT}).follow(outputs(), DELTAS, "r")]
        tracing.close()
        collector.shutdown()
        serving.join()
    [[span]] = [scope.spans for one in received for resource in one.resource_spans for scope in resource.scope_spans]
    assert span.trace_id.hex() == TRACE_ID
    assert span.name == f"chat {MODEL}"
