"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, whole or not at all."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, "utf-8")

    write_atomically(path, write)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
