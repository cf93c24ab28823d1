"""The process that helps with compiling: when it is started, what it does, and when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynaspec.compile_worker import CompileWorker

WORKER = [sys.executable, "-P", "-m", "dynaspec.compile_worker"]


def test_the_process_that_helps_compiles_what_drafting_and_control_need() -> None:
    process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.wait(timeout=300) == 0, process.communicate()
    process.communicate()


def test_the_process_that_helps_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}  # nothing is there: it would compile for a minute
    process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, env=environment)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    assert not list(tmp_path.rglob("suffix_kernels*"))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is started instead of processes."""
    started: list[list[str]] = []

    class Started:
        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr("dynaspec.compile_worker.subprocess.Popen", Started)
    return started


def test_one_process_helps_with_compiling_where_an_engine_is_built(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynaspec.compile_worker.usable_cores", lambda: 2)
    worker = CompileWorker()
    worker.start()
    assert not commands
    worker.allow()
    worker.start()
    worker.start()
    assert [command[-1] for command in commands] == ["dynaspec.compile_worker"]


def test_no_process_helps_once_the_engine_is_built(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaspec.compile_worker.usable_cores", lambda: 2)
    worker = CompileWorker()
    worker.allow()
    worker.allow(False)
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


def test_a_start_goes_on_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaspec.compile_worker.usable_cores", lambda: 2)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    worker = CompileWorker()
    worker.allow()
    worker.start()
    worker.start()
