"""Where compiled functions are kept, and when they are compiled anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba.core.errors import TypingError

import dynaspec
from dynaspec import compiled

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


def start(package: Path, script: str = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": f"{package.parent}:{SOURCES.parent}", "PYTHONDONTWRITEBYTECODE": "1"}
    clean = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=clean | paths | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def run(package: Path, **environment: str) -> tuple[list[int], int, int]:
    """Results; how many were compiled, of ``outer`` and of ``plus_one``."""
    answer, outer, plus_one = json.loads(start(package, **environment).stdout)
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


def test_the_log_says_what_is_compiled(package: Path) -> None:
    logged = "import logging\nlogging.basicConfig(level=logging.INFO)\n" + SCRIPT
    first, then = (start(package, logged).stderr for _ in range(2))
    folder = package / "__pycache__"
    line = (
        f"compiling dynaspec_example.outer.plus_one, once on this machine, to be kept in {folder}; functions so far: 1"
    )
    assert f"INFO:dynaspec.compiled:{line}\n" in first
    assert "compiling" not in then


@pytest.mark.parametrize(("functions", "lines"), [(9, 0), (25, 1)])
def test_a_program_that_has_set_up_no_log_shows_that_a_first_start_compiles(
    package: Path, functions: int, lines: int
) -> None:
    names = [f"f{n}" for n in range(functions)]
    written = [f'@njit("i8(i8)", cache=True)\ndef {name}(x):\n    return x\n' for name in names]
    (package / "many.py").write_text("from dynaspec.compiled import njit\n\n" + "\n".join(written))
    first, then = (start(package, "import dynaspec_example.many").stderr for _ in range(2))
    assert first.count("compiling") == lines
    assert ("functions so far: 10\n" in first) == bool(lines)
    assert not then


def test_constants_that_a_function_is_called_with_are_numbers_like_others(package: Path) -> None:
    change(package / "outer.py", "return inner(x) + 1", "return inner(x) + inner(1) + inner(2) + inner(x=3)")
    script = "from dynaspec_example.outer import inner, outer; print(outer(3), len(inner.signatures))"
    assert start(package, script).stdout.split() == ["18", "1"]


def test_what_stands_apart_is_loaded_before_its_callers_and_changes_with_its_sources(package: Path) -> None:
    change(package / "inner.py", "@njit(cache=True)", "@njit(cache=True, apart=True)")
    assert run(package) == ([7, 4], 1, 1)
    assert run(package) == ([7, 4], 0, 0)  # no one but ``outer`` has asked for ``inner``
    change(package / "scale.py", "2", "5")
    assert run(package) == ([16, 4], 1, 1)


def test_a_caller_is_compiled_anew_when_the_code_it_refers_to_is_of_other_sources(package: Path) -> None:
    """As when an upgrade comes between a process's look at the index and at the data."""
    change(package / "inner.py", "@njit(cache=True)", "@njit(cache=True, apart=True)")
    run(package)
    before = {file: file.read_bytes() for file in package.rglob("outer.outer*.nbc")}
    change(package / "inner.py", "FACTOR * x", "FACTOR * x * x")
    run(package)
    for file, data in before.items():
        file.write_bytes(data)
    assert run(package) == ([19, 4], 1, 0)


def test_a_function_is_compiled_anew_when_a_constant_has_changed(package: Path) -> None:
    run(package)
    change(package / "scale.py", "2", "5")
    assert run(package)[0] == [16, 4]


def test_a_function_is_compiled_anew_when_what_emits_a_part_of_it_has_changed(package: Path) -> None:
    (package / "emit.py").write_text("""
def times(builder, value, factor):
    return builder.mul(value, value.type(factor))
""")
    (package / "inner.py").write_text("""
from dynaspec_example.emit import times
from numba.extending import intrinsic

@intrinsic
def inner(typingctx, x):
    return x(x), lambda context, builder, sig, args: times(builder, args[0], 2)
""")
    assert run(package) == ([7, 4], 1, 1)
    assert run(package) == ([7, 4], 0, 0)
    change(package / "emit.py", "type(factor)", "type(factor + 3)")
    assert run(package)[:2] == ([16, 4], 1)


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


def test_the_first_function_that_has_to_be_compiled_asks_for_the_process_that_helps(package: Path) -> None:
    ask = "from dynaspec.compile_worker import compile_worker\ncompile_worker.start = lambda: print('asked')\n"
    assert start(package, ask + SCRIPT).stdout.startswith("asked")
    assert "asked" not in start(package, ask + SCRIPT).stdout


def test_results_kept_at_the_same_moment_are_never_taken_for_each_other(tmp_path: Path) -> None:
    class BothSeeNothing(compiled.ResultFiles):
        def _load_index(self) -> dict[Any, Any]:
            return {}

    for key in "first", "second":
        BothSeeNothing(str(tmp_path), "function", "stamp").save(key, f"of {key}")
    files = compiled.ResultFiles(str(tmp_path), "function", "stamp")
    assert [files.load(key) for key in ("first", "second")] == [None, "of second"]
    files.save("first", "of first")
    assert [files.load(key) for key in ("first", "second")] == ["of first", "of second"]


def test_what_other_sources_kept_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade may have moved a type that their functions took as an argument."""
    module = ModuleType("dynaspec_moved")
    module.Taken = type("Taken", (), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    compiled.ResultFiles(str(tmp_path), "function", "before").save(module.Taken, "result")
    assert compiled.ResultFiles(str(tmp_path), "function", "before").load(module.Taken) == "result"
    monkeypatch.delitem(sys.modules, module.__name__)
    assert compiled.ResultFiles(str(tmp_path), "function", "after").load("other") is None


def test_every_kernel_uses_this_cache() -> None:
    """numba's own would go on with the old code of functions of other files."""
    for file in SOURCES.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert file.name == "compiled.py" or "numba.njit" not in text, file
        assert "from numba import njit" not in text, file


def test_what_says_that_it_allocates_nothing_cannot_allocate() -> None:
    def some(size: int) -> Any:
        return np.empty(size).size

    assert compiled.njit()(some)(3) == 3
    with pytest.raises(TypingError, match="Only accept returning of array passed into the function"):
        compiled.njit(allocates=False)(some)(3)
