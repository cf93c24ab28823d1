"""Every ``dynaspec`` command line of the README and the docs is one that the command line takes; nothing is run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from unit.deploy.serve_command import DOCS, ROOT, command, context, shell_commands

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), ROOT / "deploy/README.md"]
_ENDS = frozenset({"|", ">", "2>", "2>&1", "&&", "&", ";"})
_PLACEHOLDERS = frozenset({"…", "...", "[OPTIONS]"})


def command_lines() -> Iterator[tuple[Path, list[str]]]:
    """Words behind ``dynaspec``, up to what the shell takes."""
    for page in PAGES:
        for words in shell_commands(page.read_text()):
            program = next((i for i, word in enumerate(words) if word.rpartition("/")[2] == "dynaspec"), None)
            if program is None:
                continue
            rest = list(itertools.takewhile(lambda word: word not in _ENDS, words[program + 1 :]))
            others = {"docker", "install", "journalctl"} & set(words[:program])
            if rest and not others and not _PLACEHOLDERS & set(rest) and "COMMAND" not in rest:
                yield page, rest


LINES = list(command_lines())


def fault(words: Sequence[str]) -> str | None:
    """What the command line says against a command; None if it takes it."""
    path: list[str] = []
    rest = list(words)
    while rest and rest[0] in getattr(command(*path), "commands", {}):
        path.append(rest.pop(0))
    if rest and hasattr(command(*path), "commands") and not rest[0].startswith("-"):
        return f"no such command: {rest[0]}"
    try:
        context(*path, arguments=rest)
    except Exception as error:  # typer brings a click of its own
        kind = type(error).__name__
        return None if kind == "Exit" else f"{kind}: {getattr(error, 'message', error)}"
    return None


@pytest.mark.parametrize(
    ("page", "words"), LINES, ids=lambda value: value.name if isinstance(value, Path) else " ".join(value)
)
def test_a_command_line_is_understood(page: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    told = fault(words)
    assert told is None or "does not exist" in told  # a file that the page has made before


def test_there_are_command_lines() -> None:
    assert len(LINES) > 40
    assert len({page for page, _ in LINES}) > 8


@pytest.mark.parametrize("words", [["serve", "m", "--frob"], ["bench", "frob"], ["generate", "--max-tokens", "many"]])
def test_a_wrong_one_is_not(words: list[str]) -> None:
    assert fault(words) is not None
