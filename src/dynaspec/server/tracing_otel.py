"""A span for each request to the engine, by OpenTelemetry's conventions for generative models. It tells sizes, times
and settings, never what was asked or answered, not even in an error. Needs the extra ``otel``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
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

from dynaspec import __version__
from dynaspec.contract.sampling_params import SamplingParams

from .span_attributes import OutputTally, request_attributes
from .tracing import Operation, Outputs, Trace

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
"""Seconds that a collector which does not answer may hold up the end."""


class OtelTracing:
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


class _OtelTrace:
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
