"""What the endpoints share: one object, built before the first request and never changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from dynaspec.api import AsyncLLM

from .admission import Admission
from .config import ServerConfig
from .metrics import HttpMetrics
from .tracing import NoTracing, Tracing


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
    tracing: Tracing = field(default_factory=NoTracing)


def get_state(request: Request) -> ServerState:
    """The state of the app that the request came to."""
    state: ServerState = request.app.state.dynaspec
    return state


State = Annotated[ServerState, Depends(get_state)]
