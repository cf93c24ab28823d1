"""Everything ``dynaspec train lm`` can be told, and where it keeps things."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from dynaspec.contract.errors import ConfigError
from dynaspec.train.corpus import standard_library
from dynaspec.train.distill import DistillSettings
from dynaspec.train.loop import Checkpoints
from dynaspec.train.model import DRAFT, TARGET, Shape
from dynaspec.train.optimizer import Rates
from dynaspec.train.schedule import Budget, Schedule

Stage = Literal["prepare", "target", "draft", "export", "evaluate", "all"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, slots=True)
class Places:
    """Files of the work folder, which is private to a run, and of the output folder."""

    work: Path
    out: Path

    @property
    def tokenizer(self) -> Path:
        """The learnt tokenizer."""
        return self.work / "tokenizer"

    @property
    def train(self) -> Path:
        """The tokenised training split."""
        return self.work / "train.npz"

    @property
    def generated(self) -> Path:
        """The target's continuations of training prompts."""
        return self.work / "generated.npz"

    @property
    def target(self) -> Checkpoints:
        """States of the target's training."""
        return Checkpoints(self.work / "target")

    @property
    def pretrained(self) -> Checkpoints:
        """States of the drafter before it met the target."""
        return Checkpoints(self.work / "draft-pretrain")

    @property
    def draft(self) -> Checkpoints:
        """States of the drafter's distillation."""
        return Checkpoints(self.work / "draft")


@dataclass(frozen=True, slots=True)
class LmSettings:
    """A pair of models, the text it learns from, and how long it may take."""

    places: Places
    library: Path = field(default_factory=standard_library)
    gsm8k: Path | None = None
    target: Shape = TARGET
    draft: Shape = DRAFT
    seq_len: int = 512
    batch_rows: int = 8
    seed: int = 1234
    target_budget: Budget = field(default_factory=lambda: Budget(max_seconds=105 * 60))
    draft_budget: Budget = field(default_factory=lambda: Budget(max_seconds=18 * 60))
    target_rates: Rates = field(default_factory=lambda: Rates(matrix_lr=0.01, other_lr=4e-3))
    draft_rates: Rates = field(default_factory=lambda: Rates(matrix_lr=0.015, other_lr=1e-2))
    warmup_steps: int = 30
    decay_share: float = 0.25
    distill: DistillSettings = field(default_factory=DistillSettings)
    save_seconds: float = 150.0
    device: str = "auto"
    compile: bool = False
    resume: bool = True
    extend: bool = False
    prompts_per_kind: int = 50
    note: str = ""  # for the model cards: what the figures alone do not say

    def __post_init__(self) -> None:
        if self.target.vocab != self.draft.vocab:
            raise ConfigError(
                f"vocab: got {self.target.vocab} and {self.draft.vocab}, expected the same for both models"
            )
        if not 1 < self.seq_len <= self.target.positions:
            raise ConfigError(f"seq_len: got {self.seq_len}, expected 2 to {self.target.positions}")
        if self.batch_rows < 1:
            raise ConfigError(f"batch_rows: got {self.batch_rows}, expected at least 1")
        if not 0.0 <= self.decay_share <= 1.0:
            raise ConfigError(f"decay_share: got {self.decay_share}, expected 0 to 1")
        if self.extend and not self.resume:
            raise ConfigError("extend: got it together with no resume, expected one of them")

    @property
    def schedule(self) -> Schedule:
        """The target's learning-rate schedule."""
        return Schedule(self.warmup_steps, self.decay_share)


def parse_stage(text: str) -> Stage:
    """``text`` as a stage.

    Raises:
        ConfigError: there is no such stage.
    """
    for stage in STAGES:
        if stage == text:
            return stage
    raise ConfigError(f"stage: got {text!r}, expected one of {', '.join(STAGES)}")
