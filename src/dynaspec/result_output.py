"""How commands and studies show and write their results: tables, folders, text, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynaspec.contract.errors import ConfigError


def new_table(title: str, columns: Iterable[str], left: Collection[str] = (), *, dense: bool = False) -> Table:
    """A table without rows.

    Args:
        left: columns of text; the others have numbers, which stand at the right.
        dense: as little space between columns as can be.
    """
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=not dense, collapse_padding=dense)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def make_folder(path: Path) -> None:
    """Creates the folder that results will go to: before the work that makes them.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be created: {error.strerror}") from None


def json_text(document: Mapping[str, Any]) -> str:
    """Indented, in UTF-8; a path is written as its text."""
    return json.dumps(document, indent=2, ensure_ascii=False, default=os.fspath)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, json_text(document) + "\n")


def write_text(path: Path, text: str) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
