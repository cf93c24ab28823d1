"""A run's state on disk, and how long it has worked: what every training loop needs to go on after a kill."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.train.files import write_atomically

STANDSTILL = 5.0  # a step this many times longer than usual was a pause, not work


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


def read_checkpoint(path: Path, identity: Mapping[str, Any], device: torch.device | str) -> dict[str, Any] | None:
    """What :func:`write_checkpoint` wrote; None if there is no such file.

    Raises:
        ConfigError: the checkpoint belongs to another run.
    """
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    for key, value in identity.items():
        if state["identity"].get(key) != value:
            raise ConfigError(
                f"resume: {str(path)!r} was trained with {key} = {state['identity'].get(key)!r}, "
                f"expected {value!r}; use another work folder or start afresh"
            )
    return state


class WorkClock:
    """Seconds of work: a step that takes far longer than usual was paused, and counts as a usual one."""

    def __init__(self) -> None:
        self.usual = math.inf

    def worked(self, seconds: float) -> float:
        """How much of the ``seconds`` that a step took was work."""
        worked = seconds if seconds < STANDSTILL * self.usual else self.usual
        self.usual = worked if self.usual == math.inf else 0.9 * self.usual + 0.1 * worked
        return worked
