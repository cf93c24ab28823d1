"""A span for each request to the engine, by OpenTelemetry's conventions for generative models. It tells sizes, times
and settings, never what was asked or answered, not even in an error. Needs the extra ``otel``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from threading import Thread

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from dynaspec.contract.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.version import __version__

from .state import Operation, Outputs, Trace, Tracing

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
"""Seconds that a collector which does not answer may hold up the end."""


class OtelTracing(Tracing):
    """A tracer provider of its own; OpenTelemetry's global one is neither read nor set."""

    def __init__(self, processor: SpanProcessor) -> None:
        """
        Args:
            processor: gets every span that has ended; closed with this.
        """
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("dynaspec", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> OtelTracing:
        """Sends spans in batches, from a thread of their own, to a collector's URL (OTLP over HTTP)."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def trace(self, operation: Operation, model: str, headers: Mapping[str, str]) -> Trace:
        parent = self._propagator.extract(headers, context=Context())
        return _OtelTrace(self._tracer, operation, model, parent)

    def close(self) -> None:
        closing = Thread(target=self._provider.shutdown, name="dynaspec-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            _log.warning("the collector of traces does not answer; the last spans are lost")


class _OtelTrace(Trace):
    """One HTTP request: its spans have the same parent."""

    def __init__(self, tracer: Tracer, operation: Operation, model: str, parent: Context) -> None:
        self._tracer = tracer
        self._operation = operation
        self._model = model
        self._parent = parent

    async def follow(self, outputs: Outputs, params: SamplingParams, request_id: str) -> Outputs:
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "dynaspec",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request_id,
            **request_attributes(params),
        }
        span = self._tracer.start_span(
            f"{self._operation} {self._model}", self._parent, SpanKind.SERVER, attributes=attributes
        )
        tally = OutputTally(params)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    tally.add(output)
                    yield output
        except Exception as error:
            _fail(span, error)
            raise
        finally:
            span.set_attributes(tally.attributes())
            span.end()


def _fail(span: Span, error: Exception) -> None:
    """Names the kind of error; its text may quote the request."""
    span.set_status(StatusCode.ERROR)
    span.set_attribute("error.type", type(error).__name__)


def _resource() -> Resource:
    """What the environment says (``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``); the service is ``dynaspec``
    unless it says another.
    """
    given = Resource.create({SERVICE_VERSION: __version__})
    if str(given.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        return given.merge(Resource({SERVICE_NAME: "dynaspec"}))
    return given


# --- what a span says, named as OpenTelemetry names it for generative models where it does ---


def request_attributes(params: SamplingParams) -> Mapping[str, AttributeValue]:
    """Settings of a request, defaults left out where they mean nothing; no text that the client has sent."""
    optional: dict[str, AttributeValue | None] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "dynaspec.request.max_draft_tokens": params.max_draft_tokens,
    }
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.stream": params.output_kind is not RequestOutputKind.FINAL_ONLY,
        **{name: value for name, value in optional.items() if value is not None},
    }


class OutputTally:
    """Adds up a request's outputs, whole or in deltas."""

    def __init__(self, params: SamplingParams) -> None:
        self._delta = params.output_kind is RequestOutputKind.DELTA
        self._tokens: dict[int, int] = {}
        """Output tokens by continuation."""
        self._last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        for one in output.outputs:
            before = self._tokens.get(one.index, 0) if self._delta else 0
            self._tokens[one.index] = before + len(one.token_ids)
        self._last = output

    def attributes(self) -> Mapping[str, AttributeValue]:
        """What came of the request; nothing if there was no output."""
        last = self._last
        if last is None:
            return {}
        return {
            "gen_ai.usage.input_tokens": len(last.prompt_token_ids),
            "gen_ai.usage.cache_read.input_tokens": last.num_cached_tokens,
            "gen_ai.usage.output_tokens": sum(self._tokens.values()),
            "gen_ai.response.finish_reasons": [one.finish_reason or "abort" for one in last.outputs],
            **_latency(last.outputs),
            **_speculation([one.metrics for one in last.outputs]),
        }


def _latency(outputs: Sequence[CompletionOutput]) -> Mapping[str, AttributeValue]:
    """Seconds from arrival; the first continuation's first token and the last one's end."""
    times = [one.metrics for one in outputs]
    first = [m.first_token_s - m.arrival_s for m in times if m.first_token_s]
    queued = [m.scheduled_s - m.arrival_s for m in times if m.scheduled_s]
    ended = [m.finished_s - m.arrival_s for m in times if m.finished_s]
    found = {
        "gen_ai.latency.time_in_queue": min(queued, default=None),
        "gen_ai.latency.time_to_first_token": min(first, default=None),
        "gen_ai.latency.e2e": max(ended) if len(ended) == len(times) else None,
    }
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _speculation(metrics: Sequence[RequestMetrics]) -> Mapping[str, AttributeValue]:
    drafts = sum(m.drafts for m in metrics)
    drafted = sum(m.drafted for m in metrics)
    accepted = sum(m.accepted for m in metrics)
    counts: dict[str, AttributeValue] = {
        "dynaspec.steps": sum(m.steps for m in metrics),
        "dynaspec.preemptions": sum(m.preemptions for m in metrics),
        "dynaspec.drafts": drafts,
        "dynaspec.drafted_tokens": drafted,
        "dynaspec.accepted_tokens": accepted,
    }
    if drafts:
        counts["dynaspec.mean_acceptance_length"] = sum(m.draft_emitted for m in metrics) / drafts
    if drafted:
        counts["dynaspec.draft_acceptance_rate"] = accepted / drafted
    return counts
