"""What every training run needs: device, precision, files that appear whole, checkpoints, stages and how they go."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dynaspec.contract.errors import ConfigError

STANDSTILL = 5.0  # a step this many times longer than usual was a pause, not work
PLAIN_SECONDS = 15.0


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


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where a run keeps its state: ``latest``, and ``stable``, the last one before the decay."""

    folder: Path

    @property
    def latest(self) -> Path:
        """State of the last save."""
        return self.folder / "latest.pt"

    @property
    def stable(self) -> Path:
        """State just before the learning rate began to fall."""
        return self.folder / "stable.pt"


def write_checkpoint(path: Path, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Write ``state`` to ``path``, atomically.

    ``identity`` says what makes two runs the same run (shape, data, seed).
    """
    whole = {"identity": dict(identity), **state}
    write_atomically(path, lambda temporary: torch.save(whole, temporary))


def read_checkpoint(path: Path, identity: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """What :func:`write_checkpoint` wrote, in main memory; None if there is no such file.

    Args:
        identity: the run that it has to belong to; None = any.

    Raises:
        ConfigError: the checkpoint belongs to another run.
    """
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    for key, value in (identity or {}).items():
        if state["identity"].get(key) != value:
            raise ConfigError(
                f"resume: {str(path)!r} was trained with {key} = {state['identity'].get(key)!r}, "
                f"expected {value!r}; use another work folder or start afresh"
            )
    return state


class WorkClock:
    """Seconds of work: a step that takes far longer than usual was paused, and counts as a usual one."""

    def __init__(self) -> None:
        self._usual = math.inf

    def worked(self, seconds: float) -> float:
        """How much of the ``seconds`` that a step took was work."""
        worked = seconds if seconds < STANDSTILL * self._usual else self._usual
        self._usual = worked if self._usual == math.inf else 0.9 * self._usual + 0.1 * worked
        return worked


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA if there is a device, else the CPU.

    Raises:
        ConfigError: the name is unknown, or CUDA was asked for and is missing.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: got {name!r}, expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: got 'cuda', but no CUDA device is available; expected auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        torch.set_flush_denormal(True)  # tiny momenta would otherwise take the slow path
    return torch.device(name)


def run_stages(wanted: str, stages: Mapping[str, Callable[[], None]], usual: Collection[str]) -> None:
    """Runs the stage ``wanted``, or for ``all`` the ``usual`` ones in the order of ``stages``.

    Raises:
        ConfigError: there is no such stage.
    """
    if wanted not in (*stages, "all"):
        raise ConfigError(f"stage: got {wanted!r}, expected one of {', '.join(stages)}, all")
    for name, run in stages.items():
        if wanted == name or (wanted == "all" and name in usual):
            run()


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware has products in bfloat16, which are several times as fast as in float32."""
    return device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()


def precision(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 products where the hardware has them; float32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if has_bfloat16(device) else nullcontext()


class Report(Protocol):
    """One line of progress for people."""

    @property
    def share(self) -> float:
        """Part of the stage that is over, 0 … 1."""
        ...

    @property
    def figures(self) -> str:
        """What has been done and how long the rest will take, without a line break."""
        ...


class Listener(Protocol):
    """Hears how a stage goes."""

    def __call__(self, report: Report) -> None: ...


Watch = Callable[[str], AbstractContextManager[Listener]]
"""Opens a display of how the stage with this title goes."""
Say = Callable[[str], None]
"""Takes one line of news."""


def time_left(seconds: float) -> str:
    """``seconds`` for people; infinite ones are not known."""
    return "? left" if seconds == float("inf") else f"{seconds / 60:.1f} min left"


@contextmanager
def progress(title: str, console: Console | None = None) -> Iterator[Listener]:
    """A listener that shows how the stage called ``title`` goes, for as long as the context lasts."""
    console = console or Console(file=sys.stdout)
    if not console.is_terminal:
        yield _plain(title, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=console, refresh_per_second=2) as bar:
        task = bar.add_task(title, total=1.0, figures="")

        def listen(report: Report) -> None:
            bar.update(task, completed=min(1.0, report.share), figures=report.figures)

        yield listen


def _plain(title: str, console: Console) -> Listener:
    last = -PLAIN_SECONDS

    def listen(report: Report) -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            console.print(f"{title} {report.share:.1%} {report.figures}", soft_wrap=True, highlight=False)

    return listen
