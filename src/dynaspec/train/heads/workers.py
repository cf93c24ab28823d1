"""Gradients of a step: in this process, or by single-threaded workers that take micro-batches as they can.

On a CPU several threads over one small product wait for each other, and collapse beside other work. Workers
share the weights and nothing else; each adds gradients into a buffer of its own, so a slow one only takes
fewer micro-batches.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing
from torch import Tensor

from dynaspec.contract.errors import DynaspecError
from dynaspec.train.heads.batch import join
from dynaspec.train.heads.cache import Cache
from dynaspec.train.heads.head import TrainedHead
from dynaspec.train.heads.loss import LossSettings, loss_of
from dynaspec.train.heads.plan import Ref, Step
from dynaspec.train.precision import precision

# The large buffers of a step are kept between steps instead of being mapped and cleared anew; glibc reads these
# when a process starts, other C libraries ignore them.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
PATIENCE = 5.0  # seconds between looks at whether the other side still lives


class WorkerLost(DynaspecError):
    """A worker ended before its work did."""


class Gradients(Protocol):
    """Fills ``.grad`` of the head's parameters for a step."""

    def compute(self, step: Step, seed: int) -> Tensor:
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


class Bench:
    """A head with all that a micro-batch needs; gradients add up in its parameters' ``.grad``."""

    def __init__(self, head: TrainedHead, target_head: Tensor, cache: Cache, settings: LossSettings) -> None:
        self._head, self._target_head, self._cache, self._settings = head, target_head, cache, settings
        self._device = target_head.device

    def run(self, job: Job) -> Tensor:
        """Backward pass of a micro-batch; sums for the log as in :class:`Gradients`."""
        if max(shard for shard, _ in job.refs) >= len(self._cache.shards):
            self._cache.refresh()
        batch = join([self._cache.shards[shard].example(i) for shard, i in job.refs]).to(self._device)
        with precision(self._device):
            loss, sums = loss_of(self._head, self._target_head, batch, self._settings, job.chains, job.seed)
        torch.autograd.backward(loss)
        return sums


class InProcess:
    """One process; the way to go on a GPU."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def compute(self, step: Step, seed: int) -> Tensor:
        """See :class:`Gradients`."""
        return torch.stack([self._bench.run(job) for job in jobs(step, seed)]).sum(0)

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

    def compute(self, step: Step, seed: int) -> Tensor:
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
        """End the workers."""
        for _ in self._processes:
            self._jobs.put(None)
        for process in self._processes:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()

    def _result(self) -> Any:
        while True:
            try:
                result = self._done.get(timeout=PATIENCE)
            except queue.Empty:
                ended = [p.exitcode for p in self._processes if not p.is_alive()]
                if ended:
                    raise WorkerLost(f"worker: one ended with exit status {ended[0]}; expected it to wait") from None
                continue
            if isinstance(result, str):
                raise WorkerLost(f"worker: failed with {result}")
            return result


def jobs(step: Step, seed: int) -> Sequence[Job]:
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
    bench = Bench(head, target_head, Cache(cache), settings)
    parent = os.getppid()
    while os.getppid() == parent:  # else the coordinator was killed
        try:
            job = todo.get(timeout=PATIENCE)
        except queue.Empty:
            continue
        if job is None:
            return
        try:
            done.put(bench.run(job).tolist())
        except Exception as error:
            done.put(f"{type(error).__name__}: {error}")
            raise
