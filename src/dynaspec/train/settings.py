"""Everything ``dynaspec train lm`` can be told, and where it keeps things."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dynaspec.contract.errors import ConfigError

from .distill import DistillSettings
from .model import Shape, fingerprint
from .optimizer import Budget, Rates, RateSchedule
from .run import Checkpoints


@dataclass(frozen=True, slots=True)
class Places:
    """Files of the work folder, which is private to a run, of the output folder, and of a given target."""

    work: Path
    out: Path
    given: Path | None = None  # the folder of a target that exists already

    @classmethod
    def for_given(cls, work: Path, out: Path, given: Path) -> Places:
        """Places of a drafter for ``given``: what is made for one target must not serve another."""
        return cls(work / f"given-{fingerprint(given)}", out, given)

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that was learnt, or is the given target's."""
        return self.work / "tokenizer"

    @property
    def train(self) -> Path:
        """The tokenised training split."""
        return self.work / "train.npz"

    @property
    def held_out(self) -> Path:
        """Held-out prompts as JSON lines, for measurements on texts that no model here has seen."""
        return self.work / "held-out.jsonl"

    @property
    def generated(self) -> Path:
        """The target's continuations of training prompts."""
        return self.work / "generated.npz"

    @property
    def target(self) -> Checkpoints:
        """States of the target's training."""
        return Checkpoints(self.work / "target")

    @property
    def teacher(self) -> Path:
        """The target that writes and teaches, in the Hugging Face layout; a trained one has its rounded weights."""
        return self.given or self.work / "teacher"

    @property
    def measured_target(self) -> Path:
        """The target that is evaluated with the drafter."""
        return self.given or self.out / "target"

    @property
    def exported_draft(self) -> Path:
        """The drafter in the Hugging Face layout."""
        return self.out / "draft"

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
    library: Path
    gsm8k: Path | None
    target: Shape  # of the given target, if there is one
    draft: Shape
    seq_len: int
    batch_rows: int
    seed: int
    target_budget: Budget
    draft_budget: Budget
    target_rates: Rates
    draft_rates: Rates
    decay_share: float
    distill: DistillSettings
    device: str
    compile: bool
    resume: bool
    extend: bool
    prompts_per_kind: int
    note: str  # for the model cards: what the figures alone do not say
    warmup_steps: int = 30

    def __post_init__(self) -> None:
        if self.target.vocab != self.draft.vocab:
            raise ConfigError(
                f"vocab: got {self.draft.vocab} for the drafter, expected the target's {self.target.vocab}"
            )
        given = self.places.given
        if given is not None and given.resolve() == self.places.exported_draft.resolve():
            raise ConfigError(f"target: got {str(given)!r}, which the drafter would replace, expected another folder")
        longest = self.distill.prompt_tokens + self.distill.new_tokens
        if longest > self.target.positions:
            raise ConfigError(
                f"new_tokens: got {self.distill.new_tokens} after prompts of {self.distill.prompt_tokens}, "
                f"expected no more together than the target's {self.target.positions} positions"
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
    def schedule(self) -> RateSchedule:
        """The target's learning-rate schedule."""
        return RateSchedule(self.warmup_steps, self.decay_share)
