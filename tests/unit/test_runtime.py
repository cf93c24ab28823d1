"""What importing the package leaves alone; what is left out of garbage collection, and for how long."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import dynaspec
from dynaspec.runtime import prepare_process, settle


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


class Knot:
    """Refers to itself: only a collection frees it."""

    def __init__(self) -> None:
        self.self = self


def test_what_exists_is_left_out_until_the_next_call() -> None:
    knot = Knot()
    settle()
    assert gc.get_freeze_count() > 0
    gone = weakref.ref(knot)
    del knot
    gc.collect()
    assert gone() is not None
    settle()
    assert gone() is None


IMPORT = """
import json, os, sys
import {first}
before = dict(os.environ)
import {module}
print(json.dumps([before == dict(os.environ), [name for name in ("torch", "numba") if name in sys.modules]]))
"""
WAITING = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Watch())
import {module}
"""


def files() -> dict[Path, int]:
    folder = Path(dynaspec.__file__).parent
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def new_process(script: str) -> str:
    """What it prints, in an environment that does not say how threads wait."""
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-B", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env=clean, check=True).stdout


def import_alone(module: str, first: str = "sys") -> list[object]:
    """Whether a new process's environment is the same afterwards; which of PyTorch and numba are loaded."""
    found: list[object] = json.loads(new_process(IMPORT.format(module=module, first=first)))
    return found


def test_importing_the_package_changes_neither_the_environment_nor_files() -> None:
    before = files()
    assert import_alone("dynaspec") == [True, []]
    assert files() == before


def test_the_command_line_starts_without_pytorch_and_numba() -> None:
    """They take three seconds; help, versions and what is said of wrong input need neither. Processes of vLLM's import
    the program that started them, and fail on CPUs beside numba."""
    assert import_alone("dynaspec.cli.main") == [True, []]


def test_importing_a_part_leaves_the_environment_as_it_was() -> None:
    both = ["torch", "numba"]
    assert import_alone("dynaspec.api") == [True, both]
    # What Transformers says of the environment itself is not ours.
    assert import_alone("dynaspec.hosts.transformers", first="transformers.generation.utils") == [True, both]


@pytest.mark.parametrize("module", ["dynaspec.api", "dynaspec.engine.build", "dynaspec.bench.decoders"])
def test_what_builds_engines_loads_pytorch_with_threads_that_sleep(module: str) -> None:
    assert new_process(WAITING.format(module=module)).split() == ["passive"]


def test_the_environment_decides_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    prepare_process()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    prepare_process()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
