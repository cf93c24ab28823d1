"""An engine without checkpoints: models that are pure functions of the text they read from the paged KV cache.

The fake KV entry of a token is (token + 1, position), so that a row that reads another request's block, a slot that
nobody wrote or a position out of place gives another hash, and therefore another token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.outputs import FinishReason
from dynaspec.contract.proposer import Proposer
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView, StopRule
from dynaspec.engine.loop import Loop, OverlappedLoop, SerialLoop
from dynaspec.engine.step import Step
from dynaspec.engine.target import TargetVerifier
from dynaspec.kv.blocks import Arena, BlockPool, BlockTables
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.config import DecoderConfig
from dynaspec.model.taps import Taps
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.propose.drafter import DraftModel
from dynaspec.propose.guard import FaultBarrier, NoProposer, TargetPassTimer
from dynaspec.propose.ngram import NgramProposer
from dynaspec.propose.router import Router
from dynaspec.sampling.state import SamplerState
from dynaspec.schedule.request import Request
from dynaspec.schedule.scheduler import Lanes, Scheduler

BLOCK = 16
VOCAB = 32
_PRIME = 1_000_003
_POWERS = np.array([pow(31, i, _PRIME) for i in range(4096)], dtype=np.int64)


def text_hash(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[n] hash of every prefix of a text; below 2²⁰, so that float32 holds it."""
    return (
        np.cumsum((tokens + 7) * _POWERS[np.arange(tokens.size)] + 13 * (positions - np.arange(tokens.size))) % _PRIME
    )


@dataclass
class Read:
    """One sequence of one pass."""

    context: int
    tokens: list[int]
    written: bool = True
    """The (last) row's KV was kept."""


class FakeModel:
    """Satisfies ``model.decoder.Model``.

    Args:
        order: how many tokens the next one depends on; None = all.
        deviates: share of texts after which this model differs from one with 0.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    kv_bytes_per_block = BLOCK * 2 * 4
    compiled = None

    def __init__(self, *, order: int | None = None, deviates: float = 0.0, vocab: int = VOCAB) -> None:
        self.config = DecoderConfig(1, 1, vocab, 1, 1, 1, 1, 4096)
        self.reads: list[list[Read]] = []
        """Sequences of each pass."""
        self.rows: list[int] = []
        self._order = order
        self._deviates = deviates

    def kv_shapes(self, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (num_blocks, BLOCK), (num_blocks, BLOCK)

    def repeat(self, batch: ForwardBatch, kv: Any, passes: int) -> None:
        for _ in range(passes):
            self.forward(batch, kv)

    def forward(
        self, batch: ForwardBatch, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], taps: Taps | None = None
    ) -> torch.Tensor:
        tokens, positions = (part.numpy().reshape(-1) for part in kv[0])
        written = batch.slots >= 0
        tokens[batch.slots[written]] = batch.tokens.numpy()[written] + 1
        positions[batch.slots[written]] = batch.positions[written]
        hidden = np.empty(batch.rows, dtype=np.int64)
        self.reads.append([])
        self.rows.append(batch.rows)
        for s in range(batch.sequences):
            first, last = int(batch.query_start[s]), int(batch.query_start[s + 1])
            context = int(batch.context_lens[s])
            entries = np.arange(context + last - first)
            slots = batch.block_tables[s, entries // BLOCK].astype(np.int64) * BLOCK + entries % BLOCK
            text, places = tokens[slots].astype(np.int64) - 1, positions[slots].astype(np.int64)
            if not written[first:last].all():  # a row without KV sees the context, and knows itself
                assert last == first + 1
                text[-1], places[-1] = int(batch.tokens[first]), batch.positions[first]
            self.reads[-1].append(Read(context, text.tolist(), bool(written[first])))
            hidden[first:last] = self._hash(text, places)[context:]
        return batch.without_kv_only(torch.from_numpy(hidden.astype(np.float32))[:, None])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        state = hidden[:, 0].numpy().astype(np.uint64)
        deviating = _mix(state + np.uint64(99)) % np.uint64(1000) < self._deviates * 1000
        noise = _mix(state[:, None] * np.uint64(4099) + np.arange(self.config.vocab_size, dtype=np.uint64))
        scores = (noise >> np.uint64(40)).astype(np.float64) / 2.0**24
        scores[deviating] = np.roll(scores[deviating], 1, axis=1)
        return torch.from_numpy((8.0 * scores).astype(np.float32))

    def next_token(self, text: Sequence[int]) -> int:
        """Greedy continuation, straight from the definition."""
        tokens = np.array(text, dtype=np.int64)
        state = self._hash(tokens, np.arange(tokens.size))[-1:]
        return int(self.logits(torch.from_numpy(state.astype(np.float32))[:, None]).argmax())

    def _hash(self, text: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._order is None:
            return text_hash(text, places)
        padded = np.concatenate([np.full(self._order, -1), text])
        windows = np.lib.stride_tricks.sliding_window_view(padded, self._order)[1:]
        return (windows + 7) @ _POWERS[: self._order] % _PRIME


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class ScriptedController:
    """Grants the lengths of a cycle, one a step, and keeps everything it is told."""

    lengths: tuple[int, ...] = (0,)
    stop: StopRule | None = None
    keep: int | None = None
    """``trim`` cuts every draft to this many tokens."""
    gate: float = 0.0
    proposers: tuple[int, ...] = (0,)
    """Cycles over requests, shifted by one every step."""
    views: list[StepView] = field(default_factory=list)
    plans: list[SpecPlan] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def plan(self, view: StepView) -> SpecPlan:
        length = self.lengths[len(self.views) % len(self.lengths)]
        self.views.append(view)
        depth = tuple(
            min(length, room, length if wish is None else wish)
            for room, wish in zip(view.room_depth, view.max_draft, strict=True)
        )
        turn = len(self.views)
        proposer = tuple(self.proposers[(turn + i) % len(self.proposers)] for i in range(len(depth)))
        self.plans.append(SpecPlan(view.step, depth, proposer, depth, self.stop, gate_kv_below=self.gate))
        return self.plans[-1]

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        longest = max(plan.depth, default=0) if self.keep is None else self.keep
        return plan.with_depth(tuple(min(longest, d, n) for d, n in zip(plan.depth, drafts.length, strict=True)))

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self.forgotten += ids


@dataclass
class Rig:
    """Everything an engine has between intake and outputs, small enough to run short of it."""

    lengths: tuple[int, ...] = (0,)
    drafter: str | Proposer | tuple[str | Proposer, ...] = "none"
    """Several stand side by side, and requests take turns with them."""
    overlapped: bool = False
    num_blocks: int = 64
    max_seqs: int = 4
    max_rows: int = 64
    max_tokens: int = 256
    caching: bool = True
    order: int | None = None
    deviates: float = 0.25
    stop: StopRule | None = None
    keep: int | None = None
    gate: float = 0.0
    vocab: int = VOCAB

    def __post_init__(self) -> None:
        self.target = FakeModel(order=self.order, vocab=self.vocab)
        self.draft_model = FakeModel(order=self.order, deviates=self.deviates, vocab=self.vocab)
        self.tables = BlockTables(
            BlockPool(self.num_blocks), self.max_seqs, self.max_tokens, BLOCK, caching=self.caching
        )
        self.sampler = SamplerState(self.max_seqs, self.vocab)
        self.lanes = Lanes(self.max_seqs, self.max_tokens)
        self.ticks = 0
        self.scheduler = Scheduler(self.lanes, self.tables, self.max_rows, self._clock)
        self.stats = SpecStats()
        drafters = self.drafter if isinstance(self.drafter, tuple) else (self.drafter,)
        self.proposers = tuple(map(self._proposer, drafters))
        self.controller = ScriptedController(
            self.lengths, self.stop, self.keep, self.gate, tuple(range(len(self.proposers)))
        )
        pace = TargetPassTimer()
        self.guards = [
            FaultBarrier(p, self.vocab, self.stats.proposer_fault, pace, lambda: 0.0) for p in self.proposers
        ]
        self.router = Router(self.guards)
        self.step = Step(
            scheduler=self.scheduler,
            controller=self.controller,
            proposer=self.router,
            verifier=TargetVerifier(self.target, self._arena(self.target), self.sampler, BLOCK, ()),
            sampler=self.sampler,
            limits=Limits(tuple(range(65)), tuple(p.traits for p in self.proposers), plan_lag=int(self.overlapped)),
            stats=self.stats,
            pace=pace,
            clock=self._clock,
        )
        self.loop: Loop = OverlappedLoop(self.step) if self.overlapped else SerialLoop(self.step)

    def run(self, requests: Sequence[Request], *, most: int = 2000) -> dict[str, Result]:
        """Adds the requests, runs until none is left and compares the books after every step."""
        for request in requests:
            self.scheduler.add(request)
        self.finish(most=most)
        return {request.id: Result.of(request) for request in requests}

    def finish(self, *, most: int = 2000) -> None:
        for _ in range(most):
            if not self.scheduler.unfinished:
                self.loop.close()
                return
            self.advance()
        raise AssertionError(f"requests are still unfinished after {most} steps")

    def advance(self) -> list[Request]:
        touched = self.loop.advance()
        self.scheduler.verify_integrity()
        return touched

    def _proposer(self, drafter: str | Proposer) -> Proposer:
        if not isinstance(drafter, str):
            return drafter
        if drafter == "draft_model":
            arena = self._arena(self.draft_model)
            model = DraftModel(self.draft_model, arena)
            return AutoregressiveProposer(model, self.tables, self.sampler, max_length=self.max_tokens)
        return NgramProposer(1, 3) if drafter == "ngram" else NoProposer()

    def _arena(self, model: FakeModel) -> Arena:
        return Arena.allocate(1, model.kv_shapes(self.num_blocks), model.dtype, model.device)

    def _clock(self) -> float:
        self.ticks += 1
        return float(self.ticks)


@dataclass(frozen=True)
class Result:
    """What decoding may not change."""

    output: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    @classmethod
    def of(cls, request: Request) -> Result:
        return cls(tuple(request.output), request.finish_reason, request.stop_reason)


def request(
    name: str, prompt: Sequence[int], *, most: int = 20, stop_ids: Sequence[int] = (), **params: object
) -> Request:
    """A greedy request unless ``params`` say otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": most} | params)  # type: ignore[arg-type]
    return Request(
        id=name,
        prompt=np.array(prompt, dtype=np.int32),
        params=sampling,
        max_length=len(prompt) + most,
        seed=7 if sampling.seed is None else sampling.seed,
        stop_ids=frozenset(stop_ids),
    )


def prompt(length: int, salt: int = 0) -> list[int]:
    """Tokens without any pattern."""
    return np.random.default_rng(1000 * salt + length).integers(0, VOCAB, length).tolist()


def plain_decode(text: Sequence[int], count: int, *, order: int | None = None) -> list[int]:
    """Greedy decoding by the definition of the fake target, without any engine."""
    return list(_plain_decode(tuple(text), count, order))


@cache
def _plain_decode(text: tuple[int, ...], count: int, order: int | None) -> tuple[int, ...]:
    model, tokens = FakeModel(order=order), list(text)
    for _ in range(count):
        tokens.append(model.next_token(tokens))
    return tuple(tokens[len(text) :])
