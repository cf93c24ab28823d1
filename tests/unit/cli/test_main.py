from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dynaspec import __version__
from dynaspec.cli import console
from dynaspec.cli.main import app

ENTRY = [sys.executable, "-m", "dynaspec"]


def test_version(dynaspec):
    assert dynaspec("--version").out == f"dynaspec {__version__}\n"


def test_help_lists_the_commands_without_importing_torch():
    code = "import sys; from dynaspec.cli.main import app; app(['--help'], standalone_mode=False); "
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "chat", "bench", "demo", "collect-env", "train"):
        assert command in done.stdout


def commands(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """All commands and groups, by their words."""
    yield path
    for name, command in group.commands.items():
        if hasattr(command, "commands"):  # typer brings a click of its own
            yield from commands(command, *path, name)
        else:
            yield (*path, name)


@pytest.mark.parametrize("words", list(commands(typer.main.get_group(app))), ids=" ".join)
def test_every_command_has_help(dynaspec, words):
    result = dynaspec(*words, "--help")
    assert result.code == 0, result.err
    assert "--help" in result.out


@pytest.mark.parametrize("arguments", [("generate",), ("nonsense",), ("generate", "--model"), ("bench", "offline")])
def test_wrong_usage_is_code_2(dynaspec, arguments):
    result = dynaspec(*arguments)
    assert result.code == 2
    assert "Traceback" not in result.err


def test_ctrl_c_is_code_130(dynaspec, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dynaspec.cli.generate.collect_prompts", interrupt)
    result = dynaspec("generate", "--model", "x", "y")
    assert result.code == 130
    assert "Traceback" not in result.err


def test_a_broken_pipe_is_quiet():
    """The reader goes away before anything is written."""
    with subprocess.Popen(
        [*ENTRY, "generate", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert errors == ""
    assert process.returncode not in (0, -signal.SIGSEGV)


def test_an_error_is_one_line(capsys):
    console.print_error("a\nlong [bold]message[/] " + "x" * 200)
    assert capsys.readouterr().err == "error: a long [bold]message[/] " + "x" * 200 + "\n"


def test_collect_env(dynaspec, monkeypatch):
    monkeypatch.setenv("DYNASPEC_ADAPTIVE_DRAFT_LENGTH", "1")
    facts = json.loads(dynaspec("collect-env", "--json").out)
    assert facts["versions"]["dynaspec"] == __version__
    assert facts["machine"]["cpu_count"] == os.cpu_count()
    assert facts["environment"]["DYNASPEC_ADAPTIVE_DRAFT_LENGTH"] == "1"
    assert set(map(type, facts["row_invariant_gemm"].values())) == {bool}
    table = dynaspec("collect-env").out
    assert "environment.DYNASPEC_ADAPTIVE_DRAFT_LENGTH  1" in " ".join(table.split("\n")).replace("   ", "  ")


def test_demo_prompts_are_in_the_package():
    import dynaspec.bench

    for name in ("prompts.json", "demo_prompts.json"):
        assert (Path(dynaspec.bench.__file__).parent / name).is_file()
