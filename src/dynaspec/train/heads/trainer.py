"""Training of a head: batches planned by length, gradients of several processes, steps, checkpoints."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from dynaspec.contract.errors import ConfigError, DynaspecError
from dynaspec.train.loop import Loop, Progress, smoothed
from dynaspec.train.optimizer import Optimizers, RateSchedule
from dynaspec.train.run import Checkpoints, precision

from .head import TrainedHead
from .loss import LossSettings, loss_of
from .measure import Acceptance
from .states import Cache, Ref, StateSource

# The large buffers of a step are kept between steps instead of being mapped and cleared anew; glibc reads these
# when a process starts, other C libraries ignore them.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
POLL_S = 5.0  # seconds between looks at whether the other side still lives


@dataclass(slots=True)
class PlanPosition:
    """Next conversation: number ``index`` of the order of ``epoch``, drawn over the first ``shards`` shards."""

    epoch: int = 0
    index: int = 0
    shards: int = 0


@dataclass(frozen=True, slots=True)
class BatchStep:
    """Micro-batches of one optimizer step; ``chains`` in all of them."""

    micro_batches: tuple[tuple[Ref, ...], ...]
    chains: int


class BatchPlan:
    """Walks through the cache in a new random order each epoch; shards that have come since join at its end."""

    def __init__(
        self, states: StateSource, place: PlanPosition, seed: int, batch_chains: int, micro_chains: int
    ) -> None:
        self._states, self._seed = states, seed
        self._batch_chains, self._micro_chains = batch_chains, micro_chains
        self.place = place
        self._order: list[Ref] = []
        self._drawn: tuple[int, int] | None = None

    def next(self) -> BatchStep:
        """The next step; moves ``place`` on.

        Raises:
            ConfigError: there is nothing to train on.
        """
        refs: list[Ref] = []
        chains = 0
        while chains < self._batch_chains:
            ref = self._next_ref()
            refs.append(ref)
            chains += self._chains(ref)
        return BatchStep(self._split(refs), chains)

    def _next_ref(self) -> Ref:
        place = self.place
        if place.shards == 0 or place.index >= len(self._ordered()):
            place.epoch += 1 if place.shards else 0
            place.index, place.shards = 0, self._states.refresh()
            if not self._ordered():
                raise ConfigError("conversations: got none with an answer of two tokens or more, expected some")
        ref = self._ordered()[place.index]
        place.index += 1
        return ref

    def _ordered(self) -> Sequence[Ref]:
        key = (self.place.epoch, self.place.shards)
        if self._drawn != key:
            shards = self._states.shards[: self.place.shards]
            refs = [(s, i) for s, shard in enumerate(shards) for i in range(len(shard))]
            order = np.random.default_rng((self._seed, self.place.epoch)).permutation(len(refs))
            self._order, self._drawn = [refs[i] for i in order], key
        return self._order

    def _split(self, refs: Sequence[Ref]) -> tuple[tuple[Ref, ...], ...]:
        """Micro-batches of about as many chains each; the largest first, so that workers end together."""
        parts: list[list[Ref]] = []
        room = 0
        for ref in sorted(refs, key=self._chains, reverse=True):
            if room <= 0:
                parts.append([])
                room = self._micro_chains
            parts[-1].append(ref)
            room -= self._chains(ref)
        return tuple(tuple(part) for part in parts)

    def _chains(self, ref: Ref) -> int:
        return self._states.shards[ref[0]].chains(ref[1])


class WorkerLost(DynaspecError):
    """A worker ended before its work did."""


class Gradients(Protocol):
    """Fills ``.grad`` of the head's parameters for a step."""

    def compute(self, step: BatchStep, seed: int) -> Tensor:
        """Returns float64 [depths, 2]: sampled cross-entropy by depth, and rows sampled."""
        ...

    def close(self) -> None:
        """Ends what was started."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """A micro-batch of a step with ``chains`` chains in all."""

    refs: tuple[Ref, ...]
    chains: int
    seed: int


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """For processes started meanwhile; variables that are set already stay as they are."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class InProcess:
    """One process, the way to go on a GPU: a head with all that a micro-batch needs.

    Gradients add up in its parameters' ``.grad``.
    """

    def __init__(self, head: TrainedHead, target_head: Tensor, states: StateSource, settings: LossSettings) -> None:
        self._head, self._target_head, self._states, self._settings = head, target_head, states, settings
        self._device = target_head.device

    def run(self, job: Job) -> Tensor:
        """Backward pass of a micro-batch; sums for the log as in :class:`Gradients`."""
        batch = self._states.batch(job.refs).to(self._device)
        with precision(self._device):
            loss, sums = loss_of(self._head, self._target_head, batch, self._settings, job.chains, job.seed)
        torch.autograd.backward(loss)
        return sums

    def compute(self, step: BatchStep, seed: int) -> Tensor:
        return torch.stack([self.run(job) for job in jobs(step, seed)]).sum(0)

    def close(self) -> None:
        """Nothing to end."""


class Workers:
    """``count`` processes with one thread each."""

    def __init__(self, head: TrainedHead, target_head: Tensor, cache: Path, settings: LossSettings, count: int) -> None:
        """``head`` moves into shared memory and must stay on the CPU."""
        head.share_memory()
        target_head = _shared(target_head)
        self._head = head
        context = torch.multiprocessing.get_context("spawn")
        self._jobs: Queue[Job | None] = context.Queue()
        self._done: Queue[Any] = context.Queue()
        self._gradients = [[_shared(torch.zeros_like(p)) for p in head.parameters()] for _ in range(count)]
        self._processes = [
            context.Process(
                target=_work, args=(head, target_head, cache, settings, mine, self._jobs, self._done), daemon=True
            )
            for mine in self._gradients
        ]
        with _environment(KEEP_MEMORY):
            for process in self._processes:
                process.start()

    def compute(self, step: BatchStep, seed: int) -> Tensor:
        """See :class:`Gradients`.

        Raises:
            WorkerLost: a worker has ended.
        """
        for job in jobs(step, seed):
            self._jobs.put(job)
        sums = torch.stack([torch.tensor(self._result(), dtype=torch.float64) for _ in step.micro_batches]).sum(0)
        for i, parameter in enumerate(self._head.parameters()):
            parts = [mine[i] for mine in self._gradients]
            parameter.grad = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0].clone()
            for part in parts:
                part.zero_()
        return sums

    def close(self) -> None:
        for _ in self._processes:
            self._jobs.put(None)
        for process in self._processes:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()

    def _result(self) -> Any:
        while True:
            try:
                result = self._done.get(timeout=POLL_S)
            except queue.Empty:
                ended = [p.exitcode for p in self._processes if not p.is_alive()]
                if ended:
                    raise WorkerLost(f"worker: one ended with exit status {ended[0]}; expected it to wait") from None
                continue
            if isinstance(result, str):
                raise WorkerLost(f"worker: failed with {result}")
            return result


def jobs(step: BatchStep, seed: int) -> Sequence[Job]:
    """The micro-batches of a step, each with a seed of its own."""
    return [Job(refs, step.chains, seed * 1009 + i) for i, refs in enumerate(step.micro_batches)]


def _shared(tensor: Tensor) -> Tensor:
    shared: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return shared


def _work(
    head: TrainedHead,
    target_head: Tensor,
    cache: Path,
    settings: LossSettings,
    gradients: list[Tensor],
    todo: Queue[Job | None],
    done: Queue[Any],
) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    for parameter, gradient in zip(head.parameters(), gradients, strict=True):
        parameter.grad = gradient
    mine = InProcess(head, target_head, Cache(cache), settings)
    parent = os.getppid()
    while os.getppid() == parent:  # else the coordinator was killed
        try:
            job = todo.get(timeout=POLL_S)
        except queue.Empty:
            continue
        if job is None:
            return
        try:
            done.put(mine.run(job).tolist())
        except Exception as error:
            done.put(f"{type(error).__name__}: {error}")
            raise


@dataclass(slots=True)
class HeadProgress(Progress):
    """``tokens`` are the answers' tokens that the head drafted."""

    losses: list[float] = field(default_factory=list)  # smoothed, nats, by depth
    best: float = 0.0  # held-out acceptance length
    history: list[dict[str, Any]] = field(default_factory=list)  # held-out acceptance over time


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """``tokens`` to train on in all; the schedule and everything else count them, never the clock."""

    tokens: int
    schedule: RateSchedule
    batch_tokens: int
    micro_tokens: int
    evaluate_tokens: int
    seed: int


class HeadLoop(Loop[HeadProgress]):
    """Trains a head by ``gradients`` over ``plan``, and measures it now and then and at the end."""

    stored_as = "head"

    def __init__(
        self,
        head: TrainedHead,
        optimizers: Optimizers,
        plan: BatchPlan,
        gradients: Gradients,
        evaluate: Callable[[], Acceptance],
        improved: Callable[[HeadProgress], None],
        settings: TrainSettings,
        checkpoints: Checkpoints,
        identity: Mapping[str, Any],
    ) -> None:
        """``evaluate`` measures the head as it is; ``improved`` hears when that was the best so far.

        The rest is as in :class:`Loop`.
        """
        super().__init__(head, optimizers, settings.schedule, checkpoints, identity, HeadProgress())
        self._plan, self._gradients, self._settings = plan, gradients, settings
        self._evaluate, self._improved = evaluate, improved

    def more_state(self) -> dict[str, Any]:
        return {"place": asdict(self._plan.place)}

    def take_more_state(self, state: Mapping[str, Any]) -> None:
        self._plan.place = PlanPosition(**state["place"])

    def fill_gradients(self) -> None:
        progress, step = self.progress, self._plan.next()
        sums = self._gradients.compute(step, self._settings.seed + progress.step)
        losses = (sums[:, 0] / sums[:, 1].clamp_min(1)).tolist()
        before = progress.losses or losses
        progress.losses = [smoothed(a, b, progress.step) for a, b in zip(before, losses, strict=True)]
        progress.tokens += step.chains

    def quality(self) -> str:
        """Epoch, losses by depth, and the longest acceptance so far."""
        losses = " ".join(f"{loss:.3f}" for loss in self.progress.losses)
        return f"epoch {self._plan.place.epoch} · loss {losses} · best {self.progress.best:.3f}"

    def stepped(self, tokens_before: int, over: bool) -> None:
        every = self._settings.evaluate_tokens
        if over or self.progress.tokens // every > tokens_before // every:
            self._measure()

    def _measure(self) -> None:
        """Notes the held-out acceptance of the head as it is in the progress."""
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
