"""``dynaspec serve`` in a process of its own, as its users start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 120.0


@dataclass
class ServeProcess:
    """A server that listens; its log is JSON."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)

    def signal(self) -> None:
        """Sends a SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Waits for the end."""
        return self.process.wait(PATIENCE_S)


@contextmanager
def serve(*arguments: str, **environ: str) -> Iterator[ServeProcess]:
    """Starts a server and waits until it listens."""
    command = [sys.executable, "-m", "dynaspec", "serve", "--log-format", "json", *arguments]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=os.environ | environ
    ) as process:
        server, listening = ServeProcess(process), threading.Event()
        reader = threading.Thread(target=_read, args=(server, listening))
        reader.start()
        try:
            if not listening.wait(PATIENCE_S) or not server.url:
                raise TimeoutError(f"the server did not start: {server.log}")
            yield server
        finally:
            process.kill()
            reader.join(PATIENCE_S)


def _read(server: ServeProcess, listening: threading.Event) -> None:
    for line in server.process.stderr or ():
        entry = json.loads(line) if line.startswith("{") else {"message": line}
        server.log.append(entry)
        if entry["message"] == "listening":
            server.url = entry["url"]
            listening.set()
    listening.set()
