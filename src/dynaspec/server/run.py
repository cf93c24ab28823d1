"""Runs a server from its configuration to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from ssl import SSLContext
from typing import Any, cast

import uvicorn

from dynaspec.api import AsyncLLM
from dynaspec.engine.chat_prompt import ToolFormat, format_of
from dynaspec.engine.config import EngineConfig
from dynaspec.runtime import settle

from .admission import Admission
from .app import create_app
from .chat_input import check_template
from .config import ServerConfig
from .connection import BoundedConnection
from .lifecycle import DrainingServer
from .listen import BACKLOG, allow_many_connections, bind, listen, tls_context
from .logs import configure_logging
from .state import ServerState
from .tracing import NoTracing, Tracing, open_tracing

ENGINE_DIED = 1
"""Exit code where the engine has failed."""

_HEADER_BYTES = 2**16
_FLUSH_S = 3
"""Seconds for the last bytes of answers to be sent, and read."""


def run(engine: EngineConfig, config: ServerConfig, announce: Callable[[ServerState, str], None]) -> int:
    """Loads the model, serves until a signal or the engine's death, and cleans up; for a process's main thread.

    Args:
        announce: called with the state and the server's URL when it listens.

    Returns:
        The process's exit code.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    configure_logging(config)
    context = tls_context(config)
    with (
        closing(open_tracing(config.otlp_traces_endpoint)) as tracing,
        bind(config) as bound,
        closing(_open(engine)) as llm,
    ):
        if config.chat_template is not None:
            check_template(llm.tokenizer, config.chat_template)
        state = make_state(llm, config, tracing)
        server = make_server(state, context)
        allow_many_connections()
        settle()
        announce(state, listen(bound, config))
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve([bound]))
    return ENGINE_DIED if server.failed else 0


def _open(config: EngineConfig) -> AsyncLLM:
    options = config.model_fields_set - {"model", "speculative_config"}
    return AsyncLLM(
        config.model,
        speculative_config=config.speculative_config,
        **{name: getattr(config, name) for name in options},
    )


def make_state(llm: AsyncLLM, config: ServerConfig, tracing: Tracing | None = None) -> ServerState:
    """What the endpoints share.

    Args:
        tracing: None = none.
    """
    return ServerState(
        llm=llm,
        config=config,
        admission=Admission(llm.config.max_num_seqs, config.max_queued_requests),
        served_names=config.served_model_name or (llm.config.model,),
        started_at=int(time.time()),
        tracing=tracing or NoTracing(),
        tool_format=tool_format_of(llm, config),
    )


def tool_format_of(llm: AsyncLLM, config: ServerConfig) -> ToolFormat:
    """How the model writes calls of tools, as configured or as its chat template says."""
    if config.tool_call_parser != "auto":
        return config.tool_call_parser
    return format_of(config.chat_template or llm.tokenizer.chat_template)


def make_server(state: ServerState, context: SSLContext | None = None) -> DrainingServer:
    """uvicorn with the application. The log is ours, the root path the application's.

    Args:
        context: for HTTPS; None = HTTP.
    """
    config = state.config
    connection = partial(BoundedConnection, timeout_s=config.read_timeout_s)
    options = uvicorn.Config(
        create_app(state),
        http=cast(Any, connection),  # called like a class
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=cast(int, config.keep_alive_s),  # any number will do
        timeout_graceful_shutdown=_FLUSH_S,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        ssl_context_factory=None if context is None else lambda *_: context,
    )
    return DrainingServer(options, state)
