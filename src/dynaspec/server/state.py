"""What the endpoints share: one object, built before the first request and never changed."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from dynaspec.api import AsyncLLM
from dynaspec.engine.chat_prompt import ToolFormat

from .admission import Admission
from .config import ServerConfig
from .metrics import HttpMetrics
from .tracing import NoTracing, Tracing

logger = logging.getLogger(__name__)


class UnknownFields:
    """Warns of fields of requests that are ignored, once each. Their names are the callers': so only few are told, and
    none that is no name, as it might be a text."""

    _MOST = 100
    _NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,63}")

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, path: str) -> None:
        """One has been ignored.

        Args:
            path: numbers in it say which part of a list, and do not make another field of it.
        """
        name = re.sub(r"\.\d+\.", "[].", path)
        name = name if self._NAME.fullmatch(name) else "(no name)"
        if name not in self._seen and len(self._seen) < self._MOST:
            self._seen.add(name)
            logger.warning("the field %s of a request is unknown and ignored; --strict refuses such requests", name)


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
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    tool_format: ToolFormat = "hermes"
    """How the model writes calls of tools."""


def get_state(request: Request) -> ServerState:
    """The state of the app that the request came to."""
    state: ServerState = request.app.state.dynaspec
    return state


State = Annotated[ServerState, Depends(get_state)]
