"""What commands show while they load."""

from __future__ import annotations

import io
import logging
import time

import pytest
from rich.console import Console

from dynaspec.cli.console import status

COMPILING = logging.getLogger("dynaspec.compiled")
LINE = "compiling %s, once on this machine, to be kept in %s; functions so far: %d", "some.function", "/some/folder", 7


def shown(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    """What a command shows that has to compile something."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=80)
    monkeypatch.setattr("dynaspec.cli.console.stderr_console", lambda: console)
    with status("loading a model"):
        COMPILING.info(*LINE)
        deadline = time.monotonic() + 10.0
        while terminal and "functions so far" not in text.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    return text.getvalue()


def test_a_terminal_says_that_functions_are_being_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    before = COMPILING.level, COMPILING.propagate, list(COMPILING.handlers)
    assert "compiling, once on this machine; functions so far: 7" in shown(monkeypatch, terminal=True)
    assert not caplog.records  # the command's log has warnings only
    assert (COMPILING.level, COMPILING.propagate, list(COMPILING.handlers)) == before


def test_a_log_with_all_that_happens_has_it_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shown(monkeypatch, terminal=True)
    assert [record.args for record in caplog.records] == [LINE[1:]]


def test_nothing_is_shown_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shown(monkeypatch, terminal=False)
