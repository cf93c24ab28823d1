"""What ``dynaspec serve`` takes, and commands found in text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import typer

from dynaspec.cli.main import app

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs"

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def command(*path: str) -> click.Command:
    """A command of ``dynaspec``, such as ``command("bench", "serve")``."""
    found: click.Command = typer.main.get_command(app)
    for name in path:
        found = found.commands[name]  # type: ignore[attr-defined]  # a group's
    return found


def context(*path: str, arguments: Sequence[str]) -> click.Context:
    """A command's, with its arguments read, as within ``dynaspec``; nothing is run.

    A command keeps the help option of the first context that it has, and tests share commands.
    """
    settings: dict[str, Any] = app.info.context_settings or {}
    return command(*path).make_context(" ".join(path), list(arguments), **settings)


def flags(*path: str) -> set[str]:
    """Options as they are written, ``--no-…`` too."""
    return {flag for option in command(*path).params for flag in (*option.opts, *option.secondary_opts)} - {
        "checkpoint"
    }


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Options that ``dynaspec serve`` understands of its arguments; nothing is run.

    Raises:
        click.UsageError, ConfigError: it does not understand them.
    """
    return {name: value for name, value in context("serve", arguments=arguments).params.items() if value}


def blocks(text: str, language: str) -> list[str]:
    """What stands between fences."""
    return [body for kind, body in _FENCED.findall(text) if kind == language]


def shell_commands(text: str) -> Iterator[list[str]]:
    """Words of the commands behind ``$`` in console blocks."""
    for block in blocks(text, "console"):
        for line in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            yield _words(line)


def _words(lines: str) -> list[str]:
    """Of a command, without the output that follows it: it goes on where a line ends with a backslash or in quotes."""
    taken = ""
    for line in lines.splitlines():
        taken += line + "\n"
        if not line.endswith("\\"):
            try:
                return shlex.split(taken.replace("\\\n", " "), comments=True)
            except ValueError:  # within quotes
                continue
    return shlex.split(taken, comments=True)
