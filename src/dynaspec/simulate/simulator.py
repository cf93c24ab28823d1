"""The step loop of an engine, with a trace in the place of models and a cost model in the place of a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import CapacityError, ConfigError, IntegrityError
from dynaspec.contract.signals import logits
from dynaspec.contract.step import (
    Controller,
    DraftView,
    Ended,
    Limits,
    ProposerTraits,
    SpecPlan,
    StepOutcome,
    StepView,
    StopRule,
)

from .costs import CostModel, PrefillChunk, StepLoad, StepTime, step_load
from .traces import Arrivals, Floats, Ints, Trace

_FEW_ROWS = 16
"""Prefill gets at least so many rows where decoding leaves them, however long drafts are."""
ControllerFactory = Callable[[Limits], Controller]
_ENDED: tuple[Ended, ...] = ("none", "rejected", "all_accepted", "stopped")
_NONE, _REJECTED, _ALL, _STOPPED = range(4)


class Queue:
    """Requests that have not been admitted, in the order of arrival."""

    def __init__(self, trace: Trace, arrivals: Arrivals) -> None:
        self.arrival_s: Floats = np.full(len(trace), np.nan)
        self._think_s = arrivals.think_s
        self._unborn = deque(range(len(arrivals.times), len(trace)))
        self._coming: deque[tuple[float, int]] = deque(zip(arrivals.times.tolist(), range(len(trace)), strict=False))
        self._waiting: deque[int] = deque()
        self.arrival_s[: len(arrivals.times)] = arrivals.times

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_arrival(self) -> float | None:
        """When the next request arrives; None if none is on its way."""
        return self._coming[0][0] if self._coming else None

    def arrive(self, now: float) -> None:
        """Whoever has arrived by now waits."""
        while self._coming and self._coming[0][0] <= now:
            self._waiting.append(self._coming.popleft()[1])

    def ended(self, count: int, now: float) -> None:
        """In a closed loop, each end sets off an arrival."""
        for _ in range(min(count, len(self._unborn))):
            request = self._unborn.popleft()
            self.arrival_s[request] = now + self._think_s
            self._coming.append((now + self._think_s, request))

    def peek(self) -> int | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> int:
        return self._waiting.popleft()


@dataclass(slots=True)
class Decoding:
    """Columns of the requests that decode."""

    request: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[B] indices into the trace."""
    position: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[B] output tokens they have."""
    lag: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """[B] committed tokens, but the last, that the drafter has not seen."""
    ids: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.request)

    def keep(self, where: Ints) -> None:
        self.request, self.position, self.lag = self.request[where], self.position[where], self.lag[where]
        self.ids = tuple([self.ids[i] for i in where.tolist()])

    def add(self, requests: list[int], lag: Ints, names: list[str]) -> None:
        """Requests that have just got their first token."""
        self.request = np.concatenate([self.request, np.array(requests, dtype=np.int64)])
        self.position = np.concatenate([self.position, np.ones(len(requests), dtype=np.int64)])
        self.lag = np.concatenate([self.lag, lag])
        self.ids = (*self.ids, *[names[request] for request in requests])


@dataclass(slots=True)
class _Prompt:
    request: int
    left: int
    done: int = 0


class Prefill:
    """Admission in order of arrival, and prompts computed in chunks beside the decoding requests.

    A request is admitted when there is a seat, and room in the KV memory for all of it to its end: as if admission
    knew lengths beforehand, so that nobody is ever preempted.
    """

    def __init__(self, trace: Trace, seats: int, max_rows: int, kv_tokens: int | None) -> None:
        self._trace = trace
        self._seats = seats
        self._max_rows = max_rows
        self._kv_left = kv_tokens
        self._prompts: list[_Prompt] = []

    def __len__(self) -> int:
        return len(self._prompts)

    def schedule(self, queue: Queue, decoding: int, last_rows: int) -> tuple[list[PrefillChunk], list[int]]:
        """This step's chunks, and the requests whose prompt they complete.

        Args:
            decoding: requests that decode in this step.
            last_rows: target rows that decoding took in the step before, which it may want again.
        """
        left = self._max_rows - decoding
        budget = max(self._max_rows - max(last_rows, decoding), min(left, _FEW_ROWS))
        self._admit(queue, decoding, budget)
        chunks, complete = [], []
        for prompt in self._prompts:
            if budget <= 0:
                break
            count = min(prompt.left, budget)
            chunks.append(PrefillChunk(prompt.done, count))
            prompt.done, prompt.left, budget = prompt.done + count, prompt.left - count, budget - count
            if not prompt.left:
                complete.append(prompt.request)
        if complete:
            self._prompts = [prompt for prompt in self._prompts if prompt.left]
        return chunks, complete

    def release(self, requests: Ints) -> None:
        """These have ended: their KV is free."""
        if self._kv_left is not None:
            self._kv_left += int((self._trace.prompt[requests] + self._trace.output[requests]).sum())

    def _admit(self, queue: Queue, decoding: int, budget: int) -> None:
        pending = sum(prompt.left for prompt in self._prompts)
        while decoding + len(self._prompts) < self._seats and pending < budget:
            request = queue.peek()
            if request is None or not self._try_reserve(request):
                break
            queue.pop()
            length = int(self._trace.prompt[request])
            self._prompts.append(_Prompt(request, length))
            pending += length

    def _try_reserve(self, request: int) -> bool:
        if self._kv_left is None:
            return True
        needed = int(self._trace.prompt[request] + self._trace.output[request])
        if needed > self._kv_left:
            return False
        self._kv_left -= needed
        return True


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was drafted."""

    lens: Ints
    """[B]"""
    confidence: Floats | None
    """[B, K]; undefined behind a draft's end."""

    def view(self) -> DraftView:
        lens = self.lens.tolist()
        if self.confidence is None:
            return DraftView(length=tuple(lens), confidence=((),) * len(lens))
        rows = self.confidence.tolist()
        return DraftView(
            length=tuple(lens), confidence=tuple([tuple(row[:n]) for row, n in zip(rows, lens, strict=True)])
        )


def draft(trace: Trace, at: Ints, left: Ints, depth: Ints, stop: StopRule | None) -> Drafted:
    """
    Args:
        at: [B] places of the requests' positions in the trace.
        left: [B] output tokens that each request still gets.
        depth: [B] tokens granted.
        stop: evaluated after each pass, as the engine's proposers do.
    """
    longest = int(depth.max(initial=0))
    if longest == 0 or trace.confidence is None or trace.stray is None:
        return Drafted(depth, None)
    slots = np.arange(longest)
    where = at[:, None] + slots
    # The first token that is not accepted still follows the true text; those behind it do not.
    true_text = (slots <= trace.runs[at][:, None]) & (slots < left[:, None])
    confidence = np.where(true_text, trace.confidence[where], trace.stray[where])
    if stop is None:
        return Drafted(depth, confidence)
    signal = _survival(confidence, stop) if stop.signal == "survival" else confidence
    below = _entries(stop.below, longest)
    if stop.scope == "batch_mean":
        return Drafted(_together(signal, below, depth), confidence)
    lens = _each(signal, below, depth)
    if stop.total_below:
        lens = _while_worth(signal - below, _entries(stop.total_below, longest), lens)
    return Drafted(lens, confidence)


def _survival(confidence: Floats, stop: StopRule) -> Floats:
    offset = np.array(stop.offset or (0.0,), dtype=np.float64)[:, None]
    odds = np.exp(stop.weight * logits(confidence) + _entries(stop.bias or (0.0,), confidence.shape[1]) + offset)
    return np.asarray(np.cumprod(odds / (1.0 + odds), axis=1), dtype=np.float64)


def _entries(column: Sequence[float], size: int) -> Floats:
    """The first ``size`` entries; the last one goes on."""
    return np.array(column, dtype=np.float64)[np.minimum(np.arange(size), len(column) - 1)]


def _each(signal: Floats, below: Floats, depth: Ints) -> Ints:
    low = signal < below
    first = np.where(low.any(axis=1), low.argmax(axis=1) + 1, depth)
    return np.minimum(first, depth)


def _together(signal: Floats, below: Floats, depth: Ints) -> Ints:
    for j in range(signal.shape[1]):
        running = depth > j
        if signal[running, j].mean() < below[j]:
            return np.minimum(depth, j + 1)
    return depth


def _while_worth(gain: Floats, total_below: Floats, lens: Ints) -> Ints:
    """Ends all drafts after the first pass in which those that go on gain less together than a pass must."""
    going_on = lens[:, None] > np.arange(1, gain.shape[1] + 1)
    poor = np.where(going_on, gain, 0.0).sum(axis=0) < total_below
    return np.minimum(lens, int(poor.argmax()) + 1) if poor.any() else lens


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The engine that is simulated. Names and defaults are the engine's."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_draft: int = 16
    """Longest draft; all shorter ones can run as well."""
    ragged: bool = True
    can_stop: bool = True
    can_trim: bool = True
    passes_per_draft: Literal["none", "one", "per_token"] = "per_token"
    """Never ``none``; ``per_token``: a draft model, ``one``: parallel heads."""
    catch_up_tokens: int = 512
    """Committed tokens that a drafter takes in for a request in one step; one that lags further drafts nothing."""
    kv_tokens: int | None = None
    """Tokens that the KV memory holds; None = what the cost model says."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_draft", "catch_up_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.max_draft > 64:
            raise ConfigError(f"max_draft is {self.max_draft}; expected at most 64")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} with max_num_seqs {self.max_num_seqs}; "
                "expected more, or prompts are never computed while all seats are taken"
            )
        if self.passes_per_draft not in ("per_token", "one"):
            raise ConfigError(f"passes_per_draft is {self.passes_per_draft!r}; expected 'per_token' or 'one'")

    def limits(self, *, has_confidence: bool) -> Limits:
        """What controllers are told of it."""
        name = "draft_model" if self.passes_per_draft == "per_token" else "parallel_heads"
        return Limits(
            draft_lens=tuple(range(self.max_draft + 1)),
            proposers=(ProposerTraits(name, self.passes_per_draft, has_confidence),),
            ragged=self.ragged,
            can_stop=self.can_stop and self.passes_per_draft == "per_token",
            can_trim=self.can_trim,
            verify_budget=self.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """One entry a step."""

    end_s: Floats
    step_s: Floats
    requests: Ints
    """Decoding requests."""
    drafted: Ints
    verified: Ints
    accepted: Ints
    emitted: Ints
    """Tokens of decoding requests; a prompt's first token comes with its prefill."""
    drafter_passes: Ints
    draft_s: Floats
    verify_s: Floats
    prefill_rows: Ints


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One policy over one trace on one node."""

    arrival_s: Floats
    """[N]"""
    first_token_s: Floats
    finished_s: Floats
    output: Ints
    steps: Steps

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        return float(self.finished_s.max() - self.arrival_s.min())


def simulate(
    trace: Trace,
    arrivals: Arrivals,
    costs: CostModel,
    make_controller: ControllerFactory,
    host: HostConfig | None = None,
    *,
    time_noise: float = 0.0,
    rng: np.random.Generator | None = None,
) -> SimulatedRun:
    """Serves all requests of a trace.

    Args:
        time_noise: standard deviation of the logarithm of a factor on each step's time.
        rng: for that noise.

    Raises:
        ConfigError: the controller refuses the host.
        CapacityError: a request that is larger than the KV memory.
    """
    return _Simulation(trace, arrivals, costs, make_controller, host or HostConfig(), time_noise, rng).run()


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        arrivals: Arrivals,
        costs: CostModel,
        make_controller: ControllerFactory,
        host: HostConfig,
        time_noise: float,
        rng: np.random.Generator | None,
    ) -> None:
        kv_tokens = costs.kv_tokens if host.kv_tokens is None else host.kv_tokens
        largest = int((trace.prompt + trace.output).max())
        if kv_tokens is not None and largest > kv_tokens:
            raise CapacityError(f"a request of {largest} tokens does not fit into KV memory for {kv_tokens} tokens")
        self._trace = trace
        self._costs = costs
        self._host = host
        self._limits = host.limits(has_confidence=trace.confidence is not None)
        self._traits = self._limits.proposers[0]
        self._controller = make_controller(self._limits)
        self._time_noise = time_noise
        self._rng = rng or np.random.default_rng(0)
        self._names = [f"r{i}" for i in range(len(trace))]
        self._queue = Queue(trace, arrivals)
        self._prefill = Prefill(trace, host.max_num_seqs, host.max_num_batched_tokens, kv_tokens)
        self._decoding = Decoding()
        self._first_s: Floats = np.full(len(trace), np.nan)
        self._finished_s: Floats = np.full(len(trace), np.nan)
        self._now = 0.0
        self._step = 0
        self._last_rows = 0
        self._log: list[tuple[float, ...]] = []

    def run(self) -> SimulatedRun:
        while self._advance():
            self._step += 1
        names = Steps.__slots__
        columns = dict(zip(names, np.array(self._log).T, strict=True))
        whole = {name: column.astype(np.int64) for name, column in columns.items() if not name.endswith("_s")}
        return SimulatedRun(
            arrival_s=self._queue.arrival_s,
            first_token_s=self._first_s,
            finished_s=self._finished_s,
            output=self._trace.output,
            steps=Steps(**{**columns, **whole}),
        )

    def _advance(self) -> bool:
        """One step; False when all is done."""
        self._queue.arrive(self._now)
        if not len(self._queue) and not len(self._decoding) and not len(self._prefill):
            arrival = self._queue.next_arrival
            if arrival is None:
                return False
            self._now = arrival
            self._queue.arrive(arrival)
        chunks, complete = self._prefill.schedule(self._queue, len(self._decoding), self._last_rows)
        self._run_step(chunks, complete)
        return True

    def _run_step(self, chunks: list[PrefillChunk], complete: list[int]) -> None:
        trace, decoding = self._trace, self._decoding
        context = trace.prompt[decoding.request] + decoding.position
        left = trace.output[decoding.request] - decoding.position
        at = trace.first[decoding.request] + decoding.position
        room = trace.max_tokens[decoding.request] - decoding.position - 1
        view = self._view(context, room, sum(chunk.count for chunk in chunks))
        plan = self._controller.plan(view)
        depth = self._checked(plan, view, room)
        able, ingested = self._ingest(depth)
        drafted = draft(trace, at, left, able, plan.stop)
        shown = drafted.view()
        trimmed = self._controller.trim(view, plan, shown)
        verified = np.minimum(np.array(trimmed.depth, dtype=np.int64), drafted.lens)
        accepted = np.minimum(trace.runs[at], verified)
        emitted = np.minimum(accepted + 1, left)
        skipped, redone, lag = self._catch_up(plan, drafted, accepted, emitted, ingested)
        load = step_load(
            self._traits, context, drafted.lens, verified, ingested, chunks, kv_skipped=skipped, kv_redone=redone
        )
        time = self._time(load)
        self._now += time.step_s
        ended = np.full(len(decoding), _REJECTED)
        ended[accepted == verified] = _ALL
        ended[emitted <= accepted] = _STOPPED
        ended[verified == 0] = _NONE
        self._observe(view, plan, shown, drafted.lens < able, verified, accepted, emitted, ended, load, time)
        self._last_rows = load.work.verify_rows
        self._record(load, time, drafted.lens, verified, accepted, emitted)
        decoding.lag = lag
        decoding.position = decoding.position + emitted
        self._leave(left - emitted, complete)

    def _view(self, context: Ints, room: Ints, prefill_tokens: int) -> StepView:
        size = len(context)
        rooms = tuple(room.tolist())
        return StepView(
            step=self._step,
            ids=self._decoding.ids,
            context_len=tuple(context.tolist()),
            room_depth=rooms,
            room_nodes=rooms,
            max_draft=(None,) * size,
            temperature=(0.0,) * size,
            lag=(tuple(self._decoding.lag.tolist()),),
            offers=(None,),
            prefill_tokens=prefill_tokens,
            waiting=len(self._queue),
            limits=self._limits,
        )

    def _checked(self, plan: SpecPlan, view: StepView, room: Ints) -> Ints:
        depth = np.array(plan.depth, dtype=np.int64)
        if depth.shape != room.shape or ((depth < 0) | (depth > room)).any() or any(plan.proposer):
            raise IntegrityError(f"the plan of step {view.step} does not fit its view")
        return depth

    def _ingest(self, depth: Ints) -> tuple[Ints, Ints]:
        """Lengths that can be drafted now, and the committed tokens that the drafter's first pass takes in."""
        if self._traits.passes_per_draft == "one":
            return depth, (depth > 0).astype(np.int64)
        missing = self._decoding.lag + 1
        ingested = np.where(depth > 0, np.minimum(missing, self._host.catch_up_tokens), 0)
        return np.where(missing > self._host.catch_up_tokens, 0, depth), ingested

    def _catch_up(
        self, plan: SpecPlan, drafted: Drafted, accepted: Ints, emitted: Ints, ingested: Ints
    ) -> tuple[int, int, Ints]:
        """KV writes left out and redone, and how far the drafter lags behind after the step.

        The last token of a draft is never taken in, and gated ones leave no KV: what lies behind is taken in again.
        """
        lag = self._decoding.lag
        if self._traits.passes_per_draft == "one":
            return 0, 0, lag
        seen = np.minimum(accepted, np.maximum(drafted.lens - 1, 0))
        skipped = redone = 0
        if plan.gate_kv_below > 0.0 and drafted.confidence is not None:
            slots = np.arange(drafted.confidence.shape[1])
            gated = (drafted.confidence < plan.gate_kv_below) & (slots < (drafted.lens - 1)[:, None])
            skipped = int(gated.sum())
            before = np.where(gated.any(axis=1), gated.argmax(axis=1), seen)
            usable = np.minimum(seen, before)
            redone = int((seen - usable).sum())
            seen = usable
        # Of the lag and the token behind it, ``ingested`` have been taken in; then the accepted drafts among ``seen``.
        return skipped, redone, lag + emitted - ingested - np.where(ingested > lag, seen, 0)

    def _time(self, load: StepLoad) -> StepTime:
        time = self._costs.time(load)
        if self._time_noise == 0.0:
            return time
        factor = float(np.exp(self._time_noise * self._rng.standard_normal()))
        return StepTime(time.draft_s * factor, time.verify_s * factor, time.other_s * factor)

    def _observe(
        self,
        view: StepView,
        plan: SpecPlan,
        drafts: DraftView,
        early: npt.NDArray[np.bool_],
        verified: Ints,
        accepted: Ints,
        emitted: Ints,
        ended: Ints,
        load: StepLoad,
        time: StepTime,
    ) -> None:
        self._controller.observe(
            StepOutcome(
                plan_step=view.step,
                ids=view.ids,
                proposer=plan.proposer,
                requested=plan.depth,
                drafted=drafts.length,
                verified=tuple(verified.tolist()),
                accepted=tuple(accepted.tolist()),
                emitted=tuple(emitted.tolist()),
                ended=tuple([_ENDED[i] for i in ended.tolist()]),
                early_exit=tuple(early.tolist()),
                confidence=drafts.confidence,
                work=load.work,
                draft_s=time.draft_s,
                verify_s=time.verify_s,
                step_s=time.step_s,
            )
        )

    def _record(
        self, load: StepLoad, time: StepTime, drafted: Ints, verified: Ints, accepted: Ints, emitted: Ints
    ) -> None:
        self._log.append(
            (
                self._now,
                time.step_s,
                load.requests,
                drafted.sum(),
                verified.sum(),
                accepted.sum(),
                emitted.sum(),
                len(load.work.rows_per_pass),
                time.draft_s,
                time.verify_s,
                load.work.prefill_rows,
            )
        )

    def _leave(self, remaining: Ints, complete: list[int]) -> None:
        """Ends requests with nothing remaining, and lets those decode whose prompt is complete."""
        trace, decoding = self._trace, self._decoding
        left: list[int] = decoding.request[remaining == 0].tolist()
        if left:
            self._controller.forget([self._names[request] for request in left])
            decoding.keep(np.flatnonzero(remaining))
        starting = [request for request in complete if trace.output[request] > 1]
        if complete:
            self._first_s[complete] = self._now
            left += [request for request in complete if trace.output[request] == 1]
            lag = trace.prompt[starting] if self._traits.passes_per_draft == "per_token" else np.zeros(len(starting))
            decoding.add(starting, lag.astype(np.int64), self._names)
        if left:
            self._finished_s[left] = self._now
            self._prefill.release(np.array(left))
            self._queue.ended(len(left), self._now)
