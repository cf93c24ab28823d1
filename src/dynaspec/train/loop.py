"""The training loop: batches in, steps, checkpoints out; resumes where it stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynaspec.contract.errors import ConfigError

from .data import Sampler
from .optimizer import Budget, Optimizers, RateSchedule
from .run import Checkpoints, Listener, WorkClock, read_checkpoint, time_left, write_checkpoint


@dataclass(slots=True)
class Progress:
    """What a run has done so far; seconds are those of training, pauses left out."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan  # smoothed training loss, nats a token


@dataclass(frozen=True, slots=True)
class StepReport:
    """How a run stands after a step."""

    progress: Progress
    share: float
    factor: float
    tokens_per_second: float
    seconds_left: float

    @property
    def figures(self) -> str:
        """Steps, tokens, loss, learning-rate factor, speed and time left, on one line."""
        done = self.progress
        return (
            f"step {done.step} · {done.tokens / 1e6:.2f} M tokens · loss {done.loss:.4f} · "
            f"lr × {self.factor:.2f} · {self.tokens_per_second:.0f} tokens/s · {time_left(self.seconds_left)}"
        )


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How to train, whatever the model and the loss."""

    batch_rows: int = 8
    schedule: RateSchedule = field(default_factory=lambda: RateSchedule(warmup_steps=20, decay_share=0.25))
    save_seconds: float = 180.0
    clip: float = 1.0


class Loop:
    """Trains ``model`` on rows of ``sampler`` with ``loss(model, batch)`` until the budget is spent."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        sampler: Sampler,
        loss: Callable[[Tensor], Tensor],
        settings: LoopSettings,
        checkpoints: Checkpoints | None,
        identity: dict[str, Any],
        device: torch.device,
    ) -> None:
        """``loss`` maps a batch [rows, seq_len + 1] on ``device`` to a scalar.

        ``identity`` says what makes two runs the same run (shape, data, seed); a checkpoint of
        another run is refused.
        """
        self._model = model
        self._optimizers = optimizers
        self._sampler = sampler
        self._loss = loss
        self._settings = settings
        self._checkpoints = checkpoints
        self._identity = identity
        self._device = device
        self.progress = Progress()

    def resume(self, path: Path) -> bool:
        """Continue from ``path`` if it exists; whether it did.

        Raises:
            ConfigError: the checkpoint belongs to another run.
        """
        state = read_checkpoint(path, self._identity, self._device)
        if state is None:
            return False
        self._model.load_state_dict(state["model"])
        self._optimizers.load_state_dict(state["optimizers"])
        self.progress = Progress(**state["progress"])
        return True

    def save(self, path: Path) -> None:
        state = {
            "model": self._model.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "progress": asdict(self.progress),
        }
        write_checkpoint(path, self._identity, state)

    def run(self, budget: Budget, listener: Listener | None = None) -> Progress:
        """Train until ``budget`` is spent and save; returns what was done in all."""
        settings, schedule, progress = self._settings, self._settings.schedule, self.progress
        self._model.train()
        clock, saved = WorkClock(), time.monotonic()
        decaying = schedule.decaying(budget.progress(progress.step, progress.seconds))
        while (share := budget.progress(progress.step, progress.seconds)) < 1.0:
            if not decaying and schedule.decaying(share):
                decaying = True
                self._save("stable")
            began = time.monotonic()
            factor = schedule.factor(progress.step, share)
            loss = self._step(factor)
            progress.seconds += clock.worked(time.monotonic() - began)
            smooth = 0.0 if math.isnan(progress.loss) else min(0.95, progress.step / (progress.step + 10))
            progress.loss = smooth * (progress.loss if smooth else 0.0) + (1 - smooth) * loss
            if listener is not None:
                speed = progress.tokens / progress.seconds
                left = budget.seconds_left(progress.step, progress.seconds)
                listener(StepReport(progress, share, factor, speed, left))
            if time.monotonic() - saved > settings.save_seconds:
                self._save("latest")
                saved = time.monotonic()
        self._save("latest")
        return progress

    def _save(self, which: str) -> None:
        if self._checkpoints is not None:
            self.save(getattr(self._checkpoints, which))

    def _step(self, factor: float) -> float:
        rows, progress = self._settings.batch_rows, self.progress
        batch = self._sampler.batch(progress.rows, rows).to(self._device)
        loss = self._loss(batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConfigError(
                f"loss: got {value} at step {progress.step + 1}, expected a finite number; lower the rates"
            )
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip)
        self._optimizers.set_factor(factor)
        self._optimizers.step()
        progress.step += 1
        progress.rows += rows
        progress.tokens += rows * (batch.shape[1] - 1)
        return value
