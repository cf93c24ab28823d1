"""Traces of generation requests, if they are wanted: what the endpoints see of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Literal

from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams

Operation = Literal["chat", "text_completion"]
"""``gen_ai.operation.name``."""
Outputs = AsyncGenerator[RequestOutput, None]


class Trace:
    """Follows the engine's requests behind one HTTP request; this one only hands outputs on."""

    def follow(self, outputs: Outputs, params: SamplingParams, request_id: str) -> Outputs:
        """The same outputs; closing these closes those."""
        return outputs


class Tracing:
    """Where traces go; this one goes nowhere."""

    def trace(self, operation: Operation, model: str, headers: Mapping[str, str]) -> Trace:
        """
        Args:
            model: as the client has named it.
            headers: of the HTTP request; ``traceparent`` and ``tracestate`` say what trace it belongs to.
        """
        return Trace()

    def close(self) -> None:
        """Sends what is left, for some seconds at most."""
