"""What the endpoints share: one object, built before the first request and never changed."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastapi import Depends, Request

from dynaspec.api import AsyncLLM
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.chat_prompt import ToolFormat

from .config import ServerConfig
from .middleware import Admission, HttpMetrics

logger = logging.getLogger(__name__)

IGNORED_FIELDS = "X-Ignored-Fields"
"""Header of answers to requests with unknown fields: their names."""
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,63}")


class UnknownFields:
    """Warns of fields of requests that are ignored: once; with names, once for each, where the log may have them."""

    _MOST = 100

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: Sequence[str], *, named: bool) -> None:
        """Some have been ignored.

        Args:
            names: as ``shown_field`` has them.
            named: the log may say what requests hold.
        """
        for name in names if named else ("",):
            if name not in self._seen and len(self._seen) < self._MOST:
                self._seen.add(name)
                which = f"the field {name} of a request is" if named else "fields of a request are"
                logger.warning("%s unknown and ignored (see the header %s); --strict refuses", which, IGNORED_FIELDS)


def shown_field(path: str) -> str:
    """A path to a field as a header may have it: without the places in lists; ``?`` for what is no name."""
    name = re.sub(r"\.\d+\.", "[].", path)
    return name if _FIELD.fullmatch(name) else "?"


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


@dataclass(frozen=True, slots=True)
class ServerState:
    """An engine and what stands in front of it."""

    llm: AsyncLLM
    config: ServerConfig
    admission: Admission
    served_names: tuple[str, ...]
    """Names under which the model may be asked for; answers carry the first."""
    started_at: int
    """Unix seconds."""
    http: HttpMetrics = field(default_factory=HttpMetrics)
    tracing: Tracing = field(default_factory=Tracing)
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    tool_format: ToolFormat = "hermes"
    """How the model writes calls of tools."""


def get_state(request: Request) -> ServerState:
    """The state of the app that the request came to."""
    state: ServerState = request.app.state.dynaspec
    return state


State = Annotated[ServerState, Depends(get_state)]
