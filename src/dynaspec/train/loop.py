"""The training loop: steps, checkpoints, resuming; and the loop of a language model, whose batches are rows of text."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from dynaspec.contract.errors import ConfigError

from .data import Sampler
from .optimizer import Budget, Optimizers, RateSchedule
from .run import Checkpoints, Listener, WorkClock, read_checkpoint, time_left, write_checkpoint

SAVE_SECONDS = 150.0
CLIP = 1.0
"""Largest norm of a step's gradients."""


@dataclass(slots=True)
class Progress:
    """What a run has done so far; seconds are those of training, pauses left out."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


P = TypeVar("P", bound=Progress)


@dataclass(frozen=True, slots=True)
class StepReport(Generic[P]):
    """How a run stands after a step; ``quality`` says how good it is, in a few words."""

    progress: P
    share: float
    quality: str
    factor: float
    seconds_left: float

    @property
    def figures(self) -> str:
        """Steps, tokens, loss, learning-rate factor, speed and time left, on one line."""
        done = self.progress
        return (
            f"step {done.step} · {done.tokens / 1e6:.2f} M tokens · {self.quality} · "
            f"lr × {self.factor:.2f} · {done.tokens / done.seconds:.0f} tokens/s · {time_left(self.seconds_left)}"
        )


class Loop(ABC, Generic[P]):
    """Trains a model until a budget is spent. It saves as it goes, and once before the rates begin to fall."""

    stored_as = "model"
    """Name of the model's weights in a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        schedule: RateSchedule,
        checkpoints: Checkpoints,
        identity: Mapping[str, Any],
        progress: P,
    ) -> None:
        """``identity`` says what makes two runs the same run (shape, data, seed); a checkpoint of another is refused.

        ``progress`` is that of a run that begins.
        """
        self._model, self._optimizers, self._schedule = model, optimizers, schedule
        self._checkpoints, self._identity = checkpoints, identity
        self.progress = progress

    @abstractmethod
    def fill_gradients(self) -> None:
        """Fills the gradients of the next step; notes its loss and its tokens in the progress.

        Raises:
            ConfigError: the loss is no finite number.
        """

    @abstractmethod
    def quality(self) -> str:
        """How good the model is, for the report of a step."""

    def stepped(self, tokens_before: int, over: bool) -> None:
        """Called after a step, with the tokens trained on before it and whether it was the last; does nothing here."""

    def more_state(self) -> dict[str, Any]:
        """What a checkpoint has beside weights, optimizers and progress."""
        return {}

    def take_more_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`more_state` gave; ``state`` is the whole checkpoint."""

    def resume(self, path: Path) -> bool:
        """Continue from ``path`` if it exists; whether it did.

        Raises:
            ConfigError: the checkpoint belongs to another run.
        """
        state = read_checkpoint(path, self._identity)
        if state is None:
            return False
        self._model.load_state_dict(state[self.stored_as])
        self._optimizers.load_state_dict(state["optimizers"])
        self.progress = type(self.progress)(**state["progress"])
        self.take_more_state(state)
        return True

    def save(self, path: Path) -> None:
        state = {
            self.stored_as: self._model.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "progress": asdict(self.progress),
            **self.more_state(),
        }
        write_checkpoint(path, self._identity, state)

    def run(self, budget: Budget, listener: Listener | None = None) -> P:
        """Train until ``budget`` is spent and save; returns what was done in all.

        A resumed run that had spent it before is left as it is.
        """
        schedule, progress = self._schedule, self.progress
        share = budget.progress(progress.step, progress.seconds, progress.tokens)
        if share >= 1.0 and progress.step:
            return progress
        clock, saved = WorkClock(), time.monotonic()
        decaying = schedule.decaying(share)
        while share < 1.0:
            if not decaying and schedule.decaying(share):
                decaying = True
                self.save(self._checkpoints.stable)
            began, before = time.monotonic(), progress.tokens
            factor = schedule.factor(progress.step, share)
            self._step(factor)
            progress.seconds += clock.worked(time.monotonic() - began)
            if listener is not None:
                left = budget.seconds_left(progress.step, progress.seconds, progress.tokens)
                listener(StepReport(progress, share, self.quality(), factor, left))
            share = budget.progress(progress.step, progress.seconds, progress.tokens)
            self.stepped(before, share >= 1.0)
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save(self._checkpoints.latest)
                saved = time.monotonic()
        self.save(self._checkpoints.latest)
        return progress

    def _step(self, factor: float) -> None:
        self.fill_gradients()
        norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), CLIP))
        if not math.isfinite(norm):
            raise ConfigError(
                f"gradient: got {norm} at step {self.progress.step + 1}, expected a finite number; lower the rates"
            )
        self._optimizers.set_factor(factor)
        self._optimizers.step()
        self.progress.step += 1


def smoothed(before: float, latest: float, steps: int) -> float:
    """A loss averaged over the latest steps: ``before`` is the average of the ``steps`` steps before this one."""
    keep = min(0.95, steps / (steps + 10))
    return keep * before + (1 - keep) * latest if steps else latest


@dataclass(slots=True)
class RowProgress(Progress):
    """``loss`` is the smoothed training loss, nats a token."""

    rows: int = 0
    loss: float = math.nan


class RowLoop(Loop[RowProgress]):
    """Trains a language model on ``batch_rows`` rows of ``sampler`` a step."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        sampler: Sampler,
        loss: Callable[[Tensor], Tensor],
        batch_rows: int,
        schedule: RateSchedule,
        checkpoints: Checkpoints,
        identity: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        """``loss`` maps a batch [rows, seq_len + 1] on ``device`` to a scalar; the rest is as in :class:`Loop`."""
        super().__init__(model, optimizers, schedule, checkpoints, identity, RowProgress())
        self._sampler, self._loss, self._batch_rows, self._device = sampler, loss, batch_rows, device
        model.train()

    def fill_gradients(self) -> None:
        progress, rows = self.progress, self._batch_rows
        batch = self._sampler.batch(progress.rows, rows).to(self._device)
        loss = self._loss(batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConfigError(
                f"loss: got {value} at step {progress.step + 1}, expected a finite number; lower the rates"
            )
        torch.autograd.backward(loss)
        progress.loss = smoothed(progress.loss, value, progress.step)
        progress.rows += rows
        progress.tokens += rows * (batch.shape[1] - 1)

    def quality(self) -> str:
        return f"loss {self.progress.loss:.4f}"
