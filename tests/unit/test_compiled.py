"""Where compiled functions are kept, and when they are compiled anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dynaspec

SOURCES = Path(dynaspec.__file__).parent
PACKAGE = {
    "__init__.py": "",
    "scale.py": "FACTOR = 2\n",
    "inner.py": """
from dynaspec_example.scale import FACTOR
from dynaspec.compiled import njit

@njit(cache=True)
def inner(x):
    return FACTOR * x
""",
    "outer.py": """
from dynaspec_example.inner import inner
from dynaspec.compiled import njit

@njit(cache=True)
def outer(x):
    return inner(x) + 1

@njit("i8(i8)", cache=True)
def plus_one(x):
    return x + 1
""",
}
SCRIPT = """
import json
from dynaspec_example.outer import outer, plus_one
answer = outer(3), plus_one(3)
print(json.dumps([answer, sum(outer.stats.cache_misses.values()), sum(plus_one.stats.cache_misses.values())]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "dynaspec_example"
    folder.mkdir()
    for name, text in PACKAGE.items():
        (folder / name).write_text(text)
    return folder


def run(package: Path, **environment: str) -> tuple[list[int], int, int]:
    """Results; how many were compiled, of ``outer`` and of ``plus_one``."""
    paths = {"PYTHONPATH": f"{package.parent}:{SOURCES.parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=clean | paths | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer, outer, plus_one = json.loads(done.stdout)
    return answer, outer, plus_one


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_function_is_compiled_anew_when_what_it_calls_has_changed(package: Path) -> None:
    assert run(package) == ([7, 4], 1, 1)
    assert run(package) == ([7, 4], 0, 0)
    change(package / "inner.py", "FACTOR * x", "FACTOR * x * x")
    assert run(package) == ([19, 4], 1, 1)


def test_a_function_is_compiled_anew_when_a_constant_has_changed(package: Path) -> None:
    run(package)
    change(package / "scale.py", "2", "5")
    assert run(package)[0] == [16, 4]


def test_what_is_compiled_is_kept_where_the_environment_says(package: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert run(package, NUMBA_CACHE_DIR=str(kept))[1] == 1
    assert list(kept.rglob("*.nbc"))
    assert not list(package.rglob("*.nbc"))
    assert run(package, NUMBA_CACHE_DIR=str(kept))[1] == 0


def test_another_process_finds_what_one_has_compiled() -> None:
    """A constant that changes with the process, an address say, would have every one of them compile anew."""
    modules = [
        "dynaspec." + ".".join(file.relative_to(SOURCES).with_suffix("").parts)
        for file in sorted(SOURCES.rglob("*.py"))
        if "from dynaspec.compiled import" in file.read_text(encoding="utf-8") and "vllm" not in file.parts
    ]
    script = (
        "import importlib, json, sys; from dynaspec.compiled import stamp\n"
        "print(json.dumps([importlib.import_module(name) and stamp(name) for name in sys.argv[1:]]))"
    )
    stamps = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONPATH": str(SOURCES.parent), "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script, *modules], capture_output=True, text=True, env=environment, check=True
        )
        stamps.append(dict(zip(modules, json.loads(done.stdout), strict=True)))
    assert stamps[0] == stamps[1]


def test_every_kernel_uses_this_cache() -> None:
    """numba's own would go on with the old code of functions of other files."""
    for file in SOURCES.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert file.name == "compiled.py" or "numba.njit" not in text, file
        assert "from numba import njit" not in text, file
