"""The console entry, called as a shell would call it."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from dynaspec.cli.main import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def run_command(*arguments: object) -> Result:
    """``dynaspec`` with arguments: its exit code, and what it printed."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", ["dynaspec", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Result(code, out.getvalue(), err.getvalue())
