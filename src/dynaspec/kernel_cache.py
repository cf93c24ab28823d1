"""Compiled functions of another version are not used any more.

numba keeps them beside the sources, which an upgrade leaves there, and looks at nothing but the file that a function is
in: one whose file has not changed would go on with the old code of those that it calls.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_STAMP = "compiled-by"


def drop_outdated(package: Path, version: str) -> None:
    """Deletes what other versions have compiled.

    Args:
        package: folder of the sources. Where it cannot be written to, nothing has been kept in it.
    """
    stamp = package / "__pycache__" / _STAMP
    with suppress(OSError):
        if stamp.exists() and stamp.read_text(encoding="utf-8") == version:
            return
        for kept in (*package.rglob("*.nbi"), *package.rglob("*.nbc")):
            kept.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(version, encoding="utf-8")
