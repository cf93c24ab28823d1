"""What a run of ``dynaspec train`` for a head was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dynaspec.contract.errors import ConfigError
from dynaspec.train.heads.kind import Kind
from dynaspec.train.heads.loss import LossSettings
from dynaspec.train.heads.trainer import TrainSettings
from dynaspec.train.optimizer import Rates

STAGES = ("data", "states", "train", "export", "measure", "all")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Where conversations come from: ready ones, questions from files, and what the target makes up itself.

    ``self_written`` of the latter; answers of up to ``new_tokens``, ``at_once`` together.
    """

    conversations: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()
    self_written: int = 0
    new_tokens: int = 256
    at_once: int = 64


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """A whole run."""

    kind: Kind
    model: str
    out: Path
    work: Path
    train: TrainSettings
    verifier: str
    data: DataSettings = field(default_factory=DataSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    rates: Rates = field(default_factory=lambda: Rates(matrix_lr=0.02, other_lr=3e-4, weight_decay=0.5))
    draft_vocab: int = 8192
    measure: Path | None = None
    held_out: int = 48
    longest: int = 2048
    states_gb: float = 50.0
    workers: int = 1
    device: str = "auto"
    resume: bool = True
    extend: bool = False
    note: str = ""


def parse_stage(text: str) -> str:
    """One of ``STAGES``.

    Raises:
        ConfigError: it is none.
    """
    if text not in STAGES:
        raise ConfigError(f"stage: got {text!r}, expected one of {', '.join(STAGES)}")
    return text
