"""The process that helps with compiling: when it is started, what it does, and when it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dynaspec.compile_worker import CompileWorker

WORKER = [sys.executable, "-P", "-m", "dynaspec.compile_worker"]


RUN = """
from dynaspec.compile_worker import main
from dynaspec.control import registry
from dynaspec.engine import warm_up as steps
from dynaspec.propose import warm_up as drafting
main()
print(*(module.load_kernels.cache_info().misses for module in (registry, steps, drafting)))
"""


def test_the_process_that_helps_compiles_what_drafting_control_and_steps_need() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.wait(timeout=300) == 0, process.communicate()
    assert process.communicate()[0].split() == [b"1", b"1", b"1"]  # all have run


def test_the_process_that_helps_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}  # nothing is there: it would compile for a minute
    process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, env=environment)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    assert not list(tmp_path.rglob("lengths*"))  # the controller's, which it would come to later


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is started instead of processes, on two cores."""
    monkeypatch.setattr("dynaspec.compile_worker.usable_cores", lambda: 2)
    started: list[list[str]] = []

    class Started:
        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command)

        def wait(self) -> int:
            return 0

        def communicate(self) -> None: ...

    monkeypatch.setattr("dynaspec.compile_worker.subprocess.Popen", Started)
    return started


def test_one_process_helps_with_compiling_where_an_engine_is_built(commands: list[list[str]]) -> None:
    worker = CompileWorker()
    worker.start()
    assert not commands
    worker.allow()
    worker.start()
    worker.start()
    assert [command[-1] for command in commands] == ["dynaspec.compile_worker"]


def test_the_process_that_helps_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaspec.compile_worker.usable_cores", lambda: 2)
    start, started = subprocess.Popen, []

    def slow(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(start([sys.executable, "-c", "input()"], **options))
        return started[-1]

    monkeypatch.setattr("dynaspec.compile_worker.subprocess.Popen", slow)
    worker = CompileWorker()
    worker.wait()  # there is none
    worker.allow()
    worker.start()
    [process] = started
    monkeypatch.setattr("dynaspec.compile_worker._LONGEST_S", 0.1)
    worker.wait()
    assert process.poll() is None
    monkeypatch.undo()
    process.stdin.write(b"\n")
    process.stdin.flush()
    worker.wait()
    assert process.poll() == 0


def test_no_process_helps_once_the_engine_is_built(commands: list[list[str]]) -> None:
    worker = CompileWorker()
    worker.allow()
    worker.forbid()
    worker.start()
    assert not commands


def test_no_process_helps_with_compiling_where_there_is_no_core_for_it(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynaspec.compile_worker.usable_cores", lambda: 1)
    worker = CompileWorker()
    worker.allow()
    worker.start()
    assert not commands


def test_the_pipe_to_the_process_that_helps_is_closed_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaspec.compile_worker.usable_cores", lambda: 2)
    monkeypatch.setattr("sys.executable", shutil.which("true"))  # ends at once
    pipes = []
    start = subprocess.Popen.__init__

    def keep(process: subprocess.Popen[bytes], *args: Any, **options: Any) -> None:
        start(process, *args, **options)
        pipes.append(process.stdin)

    monkeypatch.setattr(subprocess.Popen, "__init__", keep)
    worker = CompileWorker()
    worker.allow()
    worker.start()
    [pipe] = pipes
    deadline = time.monotonic() + 30
    while not pipe.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pipe.closed


@pytest.mark.parametrize("executable", ["/nowhere/python", "", None])
def test_a_start_goes_on_where_no_process_can_be_started(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynaspec.compile_worker.usable_cores", lambda: 2)
    monkeypatch.setattr("sys.executable", executable)
    worker = CompileWorker()
    worker.allow()
    worker.start()
    worker.start()
