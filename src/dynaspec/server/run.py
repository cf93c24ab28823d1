"""A server from its configuration to its end: socket, TLS, engine, application, connections that may not dawdle.

At the end what runs may finish, what does not finish is ended, and a dead engine ends everything.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dynaspec.api import AsyncLLM
from dynaspec.contract.errors import ConfigError, DynaspecError
from dynaspec.engine.chat_prompt import ToolFormat, format_of
from dynaspec.engine.config import EngineConfig
from dynaspec.runtime import settle

from .app import create_app
from .config import ServerConfig
from .errors import bad_request
from .inputs import check_template
from .middleware import Admission, as_response
from .state import ServerState, Tracing

logger = logging.getLogger(__name__)

ENGINE_DIED = 1
"""Exit code where the engine has failed."""
BACKLOG = 2048
"""Connections that wait to be accepted."""
_OPEN_FILES = 65536
_HEADER_BYTES = 2**16
_POLL_S = 0.05
_ABORT_S = 4.0
"""Seconds for the engine to end what was aborted: a step or two."""
_FLUSH_S = 3
"""Seconds for the last bytes of answers to be sent, and read."""


class BoundedConnection(H11Protocol):
    """Closes when a client does not send what it has begun, or does not take what it is sent.

    The former is the headers of a request, from the connection's or their own first byte on; and the rest of a body
    whose request has been answered already. Other bodies are ``BoundedBody``'s, idle connections uvicorn's business.
    The latter is an answer that fills all buffers between here and there: its request is given up.

    Args:
        timeout_s: seconds that a client has.
        uvicorn: what uvicorn makes its connections with.
    """

    def __init__(self, *, timeout_s: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._timeout_s = timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        # A client that does not read gets nothing more, so what waits in the buffer is dropped with the connection.
        self._unread = self.loop.call_later(self._timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an error object too."""
        body = as_response(bad_request(f"the request is no HTTP/1.1 ({msg}); expected HTTP/1.1")).body
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._taken()
        super().connection_lost(exc)

    def _look(self) -> None:
        headers_owed = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not (headers_owed or self._body_owed()):
            self._stop()
        elif self._deadline is None:
            self._start()

    def _body_owed(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY

    def _start(self) -> None:
        self._deadline = self.loop.call_later(self._timeout_s, self._close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _taken(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _close(self) -> None:
        self._deadline = None
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """uvicorn's server with a life of its own.

    ``SIGTERM`` or ``SIGINT``: nobody new is let in, requests on open connections are answered 503, running ones get
    ``drain_timeout_s`` to finish and are then aborted, each with a last output. A second signal: connections are cut.
    If the engine dies, open requests end with its error, and then the server ends if it is configured so.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._watching: asyncio.Task[None] | None = None
        self.failed = False
        """It has ended because its engine died."""
        self._signal = ""
        """The first that came; told when the server's loop has it, as a handler may have interrupted the log."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Without uvicorn's memory of signals, which it would raise again when all is done."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._signal = self._signal or signal.Signals(sig).name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._watching = asyncio.create_task(self._watch_engine())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = self._state.admission.active
        if self._signal:
            logger.info("%s: shutting down; running requests: %d", self._signal, running)
        for server in self.servers:
            server.close()
        await self._drain()
        if self._watching is not None:
            self._watching.cancel()
        if self.force_exit:
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await super().shutdown(sockets)
        logger.info("the server has stopped")

    async def _drain(self) -> None:
        admission, patience_s = self._state.admission, self._state.config.drain_timeout_s
        admission.drain()
        if admission.active:
            logger.info("running requests have %g s to finish (%d left)", patience_s, admission.active)
        until = time.monotonic() + patience_s
        while self._waits(until):
            await asyncio.sleep(_POLL_S)
        if admission.active:
            logger.warning("%d requests have not finished and are aborted", admission.active)
        until = time.monotonic() + _ABORT_S
        while self._waits(until):
            with suppress(DynaspecError):  # the engine has died meanwhile: they have ended
                await self._state.llm.abort_all()  # again and again: one may not have reached the engine yet
            await asyncio.sleep(_POLL_S)

    def _waits(self, until: float) -> bool:
        """Something runs, there is time, and no second signal has come. To be asked often: a signal wakes nobody."""
        return self._state.admission.active > 0 and time.monotonic() < until and not self.force_exit

    async def _watch_engine(self) -> None:
        why = await self._state.llm.wait_ended()
        logger.error("%s", why)
        if self._state.config.shutdown_on_engine_death:
            self.failed = self.should_exit = True


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


def open_tracing(endpoint: str | None) -> Tracing:
    """
    Args:
        endpoint: URL that takes traces by OTLP over HTTP; None = no traces.

    Raises:
        ConfigError: there is an endpoint, but OpenTelemetry is not installed.
    """
    if endpoint is None:
        return Tracing()
    try:
        from .tracing import OtelTracing
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}, but OpenTelemetry is not installed ({error.name} is missing); "
            "expected it: pip install 'dynaspec[otel]'"
        ) from None
    return OtelTracing.to(endpoint)


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


def make_server(state: ServerState, context: ssl.SSLContext | None = None) -> DrainingServer:
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
