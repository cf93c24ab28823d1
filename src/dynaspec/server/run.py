"""Runs a server from its configuration to its end: socket, TLS, engine, application."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from ssl import SSLContext
from typing import Any, cast

import uvicorn

from dynaspec.api import AsyncLLM
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.chat_prompt import ToolFormat, format_of
from dynaspec.engine.config import EngineConfig
from dynaspec.runtime import settle

from .admission import Admission
from .app import create_app
from .chat_input import check_template
from .config import ServerConfig
from .lifecycle import BoundedConnection, DrainingServer
from .state import ServerState
from .tracing import Tracing, open_tracing

BACKLOG = 2048
"""Connections that wait to be accepted."""
_OPEN_FILES = 65536


def bind(config: ServerConfig) -> socket.socket:
    """A socket at the configured address, which does not listen yet.

    Raises:
        ConfigError: the address is in use, or not this machine's.
    """
    with ExitStack() as stack:
        try:
            found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise _unusable(config, error) from None
        stack.pop_all()  # it stays open
    return bound


def listen(bound: socket.socket, config: ServerConfig) -> str:
    """Starts to listen; the URL to be reached at.

    Raises:
        ConfigError: another process has taken the address meanwhile.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise _unusable(config, error) from None
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}{config.root_path}"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What HTTPS needs; None = HTTP.

    Raises:
        ConfigError: a file is not what it should be.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_certfile and ssl_keyfile cannot be used: {error}; expected PEM and its key") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"ssl_ca_certs cannot be used: {error}; expected PEM certificates") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def allow_many_connections() -> None:
    """Raises the limit of open files as far as the system lets it; the usual 1024 is less than a queue may hold."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _unusable(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {config.host} port {config.port}: {error.strerror}; expected a free port of this machine"
    )


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
        tracing=tracing or Tracing(),
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
