"""The training loop of a head: steps, held-out acceptance, checkpoints; resumes where it stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from dynaspec.contract.errors import ConfigError
from dynaspec.train.checkpoints import Checkpoints, WorkClock, read_checkpoint, write_checkpoint
from dynaspec.train.heads.acceptance import Acceptance
from dynaspec.train.heads.head import TrainedHead
from dynaspec.train.heads.plan import Place, Plan
from dynaspec.train.heads.workers import Gradients
from dynaspec.train.optimizer import Optimizers
from dynaspec.train.report import Listener, time_left
from dynaspec.train.schedule import Schedule


@dataclass(slots=True)
class Progress:
    """What a run has done so far; ``tokens`` counts the answers' tokens it drafted, ``seconds`` leave out pauses."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # smoothed, nats, by depth
    best: float = 0.0  # held-out acceptance length
    history: list[dict[str, Any]] = field(default_factory=list)  # held-out acceptance over time


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """``tokens`` to train on in all; the schedule and everything else count them, never the clock."""

    tokens: int
    schedule: Schedule
    batch_tokens: int = 8192
    micro_tokens: int = 1536
    evaluate_tokens: int = 400_000
    save_seconds: float = 120.0
    clip: float = 1.0
    seed: int = 1234


@dataclass(frozen=True, slots=True)
class HeadReport:
    """How a run stands after a step."""

    progress: Progress
    share: float
    factor: float
    epoch: int
    tokens_per_second: float
    seconds_left: float

    @property
    def figures(self) -> str:
        """Steps, tokens, losses by depth, rate, speed and time left, on one line."""
        done = self.progress
        losses = " ".join(f"{loss:.3f}" for loss in done.losses)
        return (
            f"step {done.step} · {done.tokens / 1e6:.2f} M tokens · epoch {self.epoch} · loss {losses} · "
            f"lr × {self.factor:.2f} · {self.tokens_per_second:.0f} tokens/s · "
            f"best {done.best:.3f} · {time_left(self.seconds_left)}"
        )


class Trainer:
    """Trains ``head`` by ``gradients`` over ``plan`` until the tokens are spent."""

    def __init__(
        self,
        head: TrainedHead,
        optimizers: Optimizers,
        plan: Plan,
        gradients: Gradients,
        evaluate: Callable[[], Acceptance],
        improved: Callable[[Progress], None],
        settings: TrainSettings,
        checkpoints: Checkpoints,
        identity: dict[str, Any],
    ) -> None:
        """``evaluate`` measures the head as it is; ``improved`` hears when that was the best so far.

        ``identity`` says what makes two runs the same run; a checkpoint of another run is refused.
        """
        self._head, self._optimizers, self._plan, self._gradients = head, optimizers, plan, gradients
        self._evaluate, self._improved = evaluate, improved
        self._settings, self._checkpoints, self._identity = settings, checkpoints, identity
        self.progress = Progress()

    def resume(self, path: Path) -> bool:
        """Continue from ``path`` if it exists; whether it did.

        Raises:
            ConfigError: the checkpoint belongs to another run.
        """
        state = read_checkpoint(path, self._identity, "cpu")
        if state is None:
            return False
        self._head.load_state_dict(state["head"])
        self._optimizers.load_state_dict(state["optimizers"])
        self.progress = Progress(**state["progress"])
        self._plan.place = Place(**state["place"])
        return True

    def save(self, path: Path) -> None:
        """Write the whole state to ``path``, atomically."""
        state = {
            "head": self._head.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "progress": asdict(self.progress),
            "place": asdict(self._plan.place),
        }
        write_checkpoint(path, self._identity, state)

    def run(self, listener: Listener | None = None) -> Progress:
        """Train until the tokens are spent, measure and save; returns what was done in all.

        A run that had spent them before is left as it is.
        """
        settings, schedule, progress = self._settings, self._settings.schedule, self.progress
        if progress.tokens >= settings.tokens:
            return progress
        clock, saved = WorkClock(), time.monotonic()
        decaying = schedule.decaying(progress.tokens / settings.tokens)
        while (share := progress.tokens / settings.tokens) < 1.0:
            if not decaying and schedule.decaying(share):
                decaying = True
                self.save(self._checkpoints.stable)
            began = time.monotonic()
            factor = schedule.factor(progress.step, share)
            before = progress.tokens
            self._step(factor)
            progress.seconds += clock.worked(time.monotonic() - began)
            if listener is not None:
                speed = (progress.tokens - before) / clock.usual
                left = max(0, settings.tokens - progress.tokens) / speed
                listener(HeadReport(progress, share, factor, self._plan.place.epoch, speed, left))
            if progress.tokens // settings.evaluate_tokens > before // settings.evaluate_tokens:
                self.measure()
            if time.monotonic() - saved > settings.save_seconds:
                self.save(self._checkpoints.latest)
                saved = time.monotonic()
        self.measure()
        self.save(self._checkpoints.latest)
        return progress

    def measure(self) -> Acceptance:
        """Held-out acceptance of the head as it is, noted in the progress."""
        acceptance, progress = self._evaluate(), self.progress
        progress.history.append(
            {
                "tokens": progress.tokens,
                "seconds": round(progress.seconds),
                "acceptance_length": round(acceptance.length, 4),
                "rates": [round(rate, 4) for rate in acceptance.rates],
            }
        )
        if acceptance.length > progress.best:
            progress.best = acceptance.length
            self._improved(progress)
        return acceptance

    def _step(self, factor: float) -> None:
        progress, settings = self.progress, self._settings
        step = self._plan.next()
        sums = self._gradients.compute(step, settings.seed + progress.step)
        losses = (sums[:, 0] / sums[:, 1].clamp_min(1)).tolist()
        norm = float(nn.utils.clip_grad_norm_(self._head.parameters(), settings.clip))
        if not math.isfinite(norm):
            raise ConfigError(
                f"gradient: got {norm} at step {progress.step + 1}, expected a finite number; lower the rates"
            )
        self._optimizers.set_factor(factor)
        self._optimizers.step()
        keep = min(0.95, progress.step / (progress.step + 10)) if progress.losses else 0.0
        old = progress.losses or losses
        progress.losses = [keep * a + (1 - keep) * b for a, b in zip(old, losses, strict=True)]
        progress.step += 1
        progress.tokens += step.chains
