"""The other end of ``worker.py``: a peer's process, started, asked and ended."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers.common import Workload


class PeerError(Exception):
    """A peer did not do what it was asked; the text says why."""


class Process:
    """A worker. It waits, idle, from one workload to the next.

    Args:
        command: starts it.
        environment: its variables, all of them.
        log: gets its standard error.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=dict(environment),
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> dict[str, str]:
        """The peer's packages and their versions.

        Raises:
            PeerError: it did not start.
        """
        versions: dict[str, str] = self._answer(timeout_s)["ready"]
        return versions

    def run(self, workload: Workload, timeout_s: float) -> tuple[float, list[list[int]]]:
        """(seconds, answers).

        Raises:
            PeerError: it could not, or has ended. One that is late is ended.
        """
        if self._process.stdin is None or not self.alive:
            raise PeerError(self._last_words())
        try:
            self._process.stdin.write(json.dumps(workload) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(self._last_words()) from None
        answer = self._answer(timeout_s)
        return float(answer["seconds"]), answer["answers"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # what it was never told
                    stream.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        out = self._process.stdout
        if out is None or not select.select([out], [], [], timeout_s)[0]:
            self.close()
            raise PeerError(f"no answer in {timeout_s:.0f} s")
        line = out.readline()
        if not line:
            raise PeerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with status {status}: {' '.join(lines[-1:])[:200]}"
