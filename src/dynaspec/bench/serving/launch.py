"""Servers that a measurement starts itself, on the loopback, and always stops again."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dynaspec.bench.policies import PolicySpec
from dynaspec.contract.errors import ConfigError

from .server import ServerError, connect
from .settings import Target

HOST = "127.0.0.1"
_KEYS = "DYNASPEC_API_KEY"
"""A server that only this process can know of needs no keys."""
_POLL_S = 0.5
_STOP_S = 60.0
"""What a server gets to finish after it was asked to stop."""


def serve_command(model: str, spec: PolicySpec, port: int, further: Sequence[str]) -> list[str]:
    """The command line of a server under a policy.

    Args:
        further: options of ``dynaspec serve``, which come last.
    """
    command = [sys.executable, "-m", "dynaspec.cli.main", "serve", model, "--host", HOST, "--port", str(port)]
    if spec.config is not None:
        given = spec.config.model_dump(mode="json", exclude_none=True)
        command += ["--speculative-config", json.dumps(given)]
    return [*command, *further]


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@asynccontextmanager
async def launched(
    name: str, command: Sequence[str], root: str, log: Path, timeout_s: float
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server process that runs as long as the context; it has listed its models when the context begins.

    Args:
        name: what messages call it.
        root: where it will listen.
        log: receives what it writes.

    Raises:
        ServerError: it ended, or was not ready in time; the message has the last line that it wrote.
        ConfigError: the log cannot be written.
    """
    try:
        output = log.open("wb")
    except OSError as error:
        raise ConfigError(f"the log {log} cannot be written: {error.strerror}") from None
    environment = {name: value for name, value in os.environ.items() if name != _KEYS}
    with output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        try:
            await _wait(name, process, root, log, timeout_s)
            yield process
        finally:
            await _stop(process)


async def _wait(name: str, process: asyncio.subprocess.Process, root: str, log: Path, timeout_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with connect(Target(root=root)) as server:
        while process.returncode is None:
            try:
                if await server.models():
                    return
            except ServerError:
                pass  # it does not listen yet
            if asyncio.get_running_loop().time() >= deadline:
                raise ServerError(f"the server of {name} was not ready after {timeout_s:g} s, see {log}")
            await asyncio.sleep(_POLL_S)
    raise ServerError(f"the server of {name} ended with code {process.returncode}: {_last_line(log)}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"it wrote nothing to {log}"
