"""A process that compiles, at a first start, what drafting, control and steps need whatever the model is.

numba compiles one function at a time in a process. So the engine's own process compiles the model's part meanwhile, and
finds the rest on disk. What fails here is compiled there when its turn comes.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from contextlib import suppress

from dynaspec.cores import usable_cores

_MODULES = "dynaspec.propose.warm_up", "dynaspec.control.registry", "dynaspec.engine.warm_up"
"""Whose ``load_kernels`` it calls; what they need does not depend on the model. Imported by the worker alone."""
_LONGEST_S = 120.0
"""Most that an engine waits for the worker, which usually takes a minute from its start."""


class CompileWorker:
    """The worker, as the process sees it that builds an engine. It ends when it is done, or with that process."""

    def __init__(self) -> None:
        self._allowed = False
        self._process: subprocess.Popen[bytes] | None = None

    def allow(self) -> None:
        """From now on an engine is being built."""
        self._allowed = True

    def forbid(self) -> None:
        """It is built: what is compiled from now on is not much, and requests need the cores."""
        self._allowed = False

    def wait(self) -> None:
        """Waits until it has ended: what it compiles is needed next, and passes timed beside it would look too slow."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LONGEST_S)

    def start(self) -> None:
        """To be called when a function has to be compiled: once, if that is allowed and there is a core for it."""
        if not self._allowed or self._process is not None or usable_cores() < 2 or not sys.executable:
            return
        command = [sys.executable, "-P", "-m", __name__]
        quiet = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        except OSError:  # no more processes, say: it is only for speed
            self._allowed = False
        else:
            threading.Thread(target=_reap, args=(self._process,), daemon=True).start()


compile_worker = CompileWorker()
"""This process's."""


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Leaves neither a zombie nor an open pipe behind."""
    process.wait()
    process.communicate()  # closes the pipe, which would have ended it before


def main() -> None:
    """Ends at the latest when the process has ended that holds the other end of stdin."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    for module in _MODULES:
        importlib.import_module(module).load_kernels()


def _end_with_starter() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)  # files are replaced whole


if __name__ == "__main__":
    main()
