"""What commands show while they load and decode."""

from __future__ import annotations

import io
import logging
import time
from dataclasses import replace

import pytest
from rich.console import Console

from dynaspec.cli.console import StreamView, status
from dynaspec.contract.outputs import CompletionOutput, RequestMetrics, RequestOutput

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


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_the_stream_shows_every_character_once_and_colours_drafts():
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True)
    view = StreamView(console, Letters(), "1\n2\n3\n4\n5\n> ")
    output = RequestOutput("0", None, (), (), False)
    steps = [(1, 0), (4, 2), (5, 2), (8, 4)]  # tokens, accepted
    for tokens, accepted in steps:
        text = "abcdefgh"[:tokens]
        completion = CompletionOutput(
            index=0, text=text, token_ids=tuple(map(ord, text)), metrics=RequestMetrics(accepted=accepted)
        )
        view.update(replace(output, outputs=(completion,), finished=tokens == 8))
    styled = console.export_text(clear=False, styles=True)
    assert "\x1b[32mbc\x1b[0m" in styled
    assert "\x1b[32mfg\x1b[0m" in styled
    assert console.export_text() == "…\n3\n4\n5\n> abcdefgh\n"
