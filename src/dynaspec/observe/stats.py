"""What an engine has done and is doing: meters that add it up, and what they show at one moment.

Those of requests have no clock of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal, NamedTuple, Protocol, get_args

from dynaspec.contract.outputs import FinishReason
from dynaspec.contract.proposer import KeptText
from dynaspec.contract.step import StepOutcome

from .counts import ROWS, SCALARS, STEP_S, TOKENS, WAIT_S, Histogram, HistogramCounts, SpecCounts


class SpecStats:
    """Adds up step outcomes, skipped drafts, proposer faults and preemptions.

    Written by one thread; any thread may take a snapshot. Adds in place: a ``SpecCounts`` for every step
    would take five times as long.
    """

    def __init__(self) -> None:
        self.steps = StepMeter()
        """Told of every outcome too; not locked."""
        self._lock = Lock()
        self._totals: dict[str, Any] = dict.fromkeys(SCALARS, 0)
        self._drafted_per_pos: list[int] = []
        self._accepted_per_pos: list[int] = []
        self._skipped: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def record(self, outcome: StepOutcome) -> None:
        """A step has been committed."""
        work, totals = outcome.work, self._totals
        self.steps.record(outcome)
        with self._lock:
            totals["steps"] += 1
            totals["request_steps"] += len(outcome.ids)
            totals["target_passes"] += 1 if outcome.ids or work.prefill_rows > 0 else 0
            totals["drafter_passes"] += len(work.rows_per_pass)
            totals["prefill_rows"] += work.prefill_rows
            totals["emitted"] += sum(outcome.emitted)
            totals["draft_s"] += outcome.draft_s
            totals["verify_s"] += outcome.verify_s
            totals["step_s"] += outcome.step_s
            totals["kv_skipped"] += work.kv_skipped
            totals["kv_redone"] += work.kv_redone
            if any(outcome.requested):
                self._record_drafts(outcome)

    def skip(self, reasons: Mapping[str, int]) -> None:
        """Drafts came to nothing: how many, by the reason."""
        for reason, count in reasons.items():  # for a few, in less than half the time that ``update`` takes
            self._skipped[reason] += count

    def proposer_fault(self, kind: str) -> None:
        """A proposer failed: see ``SpecCounts.faults``."""
        with self._lock:
            self._totals["proposer_faults"] += 1
            self._faults[kind] += 1

    def preemption(self, count: int = 1) -> None:
        """Requests lost their KV and wait again."""
        with self._lock:
            self._totals["preemptions"] += count

    def merge(self, other: SpecCounts) -> None:
        """Adds another engine's totals. ``steps`` is left as it is: it says what this engine's own steps are like."""
        with self._lock:
            for name in SCALARS:
                self._totals[name] += getattr(other, name)
            _add(self._drafted_per_pos, other.drafted_per_pos)
            _add(self._accepted_per_pos, other.accepted_per_pos)
            self._skipped.update(other.skipped)
            self._faults.update(other.faults)

    def snapshot(self) -> SpecCounts:
        """The totals so far; later ones minus this are what happened since."""
        with self._lock:
            return SpecCounts(
                **self._totals,
                drafted_per_pos=tuple(self._drafted_per_pos),
                accepted_per_pos=tuple(self._accepted_per_pos),
                skipped=dict(self._skipped),
                faults=dict(self._faults),
            )

    def _record_drafts(self, outcome: StepOutcome) -> None:
        totals, drafted = self._totals, outcome.drafted
        asked = [k for k in outcome.requested if k > 0]
        totals["proposals"] += len(asked)
        totals["tokens_requested"] += sum(asked)
        totals["early_exits"] += sum(outcome.early_exit)
        totals["drafts"] += len(drafted) - drafted.count(0)
        totals["draft_tokens"] += sum(drafted)
        totals["verified"] += sum(outcome.verified)
        totals["accepted"] += sum(outcome.accepted)
        totals["draft_emitted"] += sum([e for d, e in zip(drafted, outcome.emitted, strict=True) if d])
        _count(self._drafted_per_pos, drafted)
        _count(self._accepted_per_pos, outcome.accepted)


def _count(per_pos: list[int], lengths: Sequence[int]) -> None:
    """Entry j grows by the number of lengths > j."""
    per_pos.extend([0] * (max(lengths) - len(per_pos)))
    for length in lengths:
        for j in range(length):
            per_pos[j] += 1


def _add(mine: list[int], other: Sequence[int]) -> None:
    mine.extend([0] * (len(other) - len(mine)))
    for j, count in enumerate(other):
        mine[j] += count


RECENT_STEPS = 64
"""Steps over which the recent goodput is averaged, exponentially."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """Totals over steps, and what the latest ones gave."""

    step_s: HistogramCounts
    batch_size: HistogramCounts
    """Decoding requests of steps that had any."""
    tokens: HistogramCounts
    """Prompt tokens computed and tokens emitted by decoding requests, in each step."""
    recent_goodput: float | None
    """Tokens a second of the latest steps without prefill, waiting between steps left out; None before the first."""


class StepMeter:
    """Written by the engine's thread only, which takes the snapshots too."""

    def __init__(self) -> None:
        self._step_s, self._batch_size, self._tokens = Histogram(STEP_S), Histogram(ROWS), Histogram(ROWS)
        self._recent_tokens = self._recent_s = 0.0

    def record(self, outcome: StepOutcome) -> None:
        """A step has been committed."""
        emitted, prefilled = sum(outcome.emitted), outcome.work.prefill_rows
        self._step_s.observe(outcome.step_s)
        self._tokens.observe(emitted + prefilled)
        if not outcome.ids:
            return
        self._batch_size.observe(len(outcome.ids))
        if not prefilled:  # controllers predict steps of decoding alone, so that is what can be compared
            keep = 1.0 - 1.0 / RECENT_STEPS
            self._recent_tokens = keep * self._recent_tokens + emitted
            self._recent_s = keep * self._recent_s + outcome.step_s

    def snapshot(self) -> StepTotals:
        return StepTotals(
            step_s=self._step_s.snapshot(),
            batch_size=self._batch_size.snapshot(),
            tokens=self._tokens.snapshot(),
            recent_goodput=self._recent_tokens / self._recent_s if self._recent_s else None,
        )


FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


class Timed(Protocol):
    """What is read of a continuation; times are monotonic seconds of one clock."""

    arrival_s: float
    scheduled_s: float
    """When it was seated first."""
    first_token_s: float
    last_token_s: float
    finished_s: float
    finish_reason: FinishReason | None

    @property
    def prompt(self) -> Sized: ...

    @property
    def output(self) -> Sized: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTotals:
    """Totals over continuations. Those that were aborted count as ``finished``, not in what only an end can tell."""

    prompt_tokens: int
    """Of prompts whose first token has come."""
    generation_tokens: int
    finished: Mapping[FinishReason, int]

    queue_s: HistogramCounts
    """Arrival to seat."""
    prefill_s: HistogramCounts
    """Seat to first token."""
    first_token_s: HistogramCounts
    """Arrival to first token."""
    inter_token_s: HistogramCounts
    """Between two outputs; each brings one token or, with drafts accepted, several."""

    decode_s: HistogramCounts
    """First to last token."""
    inference_s: HistogramCounts
    """Seat to end."""
    e2e_s: HistogramCounts
    """Arrival to end."""
    per_output_token_s: HistogramCounts
    """First to last token, by the tokens after the first; outputs of one token have none."""
    prompt_length: HistogramCounts
    output_length: HistogramCounts


_BOUNDS: Mapping[str, tuple[float, ...]] = {
    **dict.fromkeys(("queue_s", "prefill_s", "first_token_s", "decode_s", "inference_s", "e2e_s"), WAIT_S),
    **dict.fromkeys(("inter_token_s", "per_output_token_s"), STEP_S),
    **dict.fromkeys(("prompt_length", "output_length"), TOKENS),
}
"""Of the histograms of ``RequestTotals``, by field."""


@dataclass(slots=True)
class _Progress:
    """What has been seen of a continuation."""

    tokens: int = 0
    at: float = 0.0


class RequestMeter:
    """Written by the engine's thread only, which takes the snapshots too."""

    def __init__(self) -> None:
        self._live: dict[Timed, _Progress] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: dict[FinishReason, int] = dict.fromkeys(FINISH_REASONS, 0)
        self._seen = {name: Histogram(bounds) for name, bounds in _BOUNDS.items()}

    def arrived(self, request: Timed) -> None:
        """It is followed from now on, until it ends."""
        self._live[request] = _Progress()

    def step(self, touched: Iterable[Timed]) -> None:
        """A step was committed that these were part of. Any that had left before are passed over."""
        for request in touched:
            progress = self._live.get(request)
            if progress is None:
                continue
            tokens, now = len(request.output), request.last_token_s
            if tokens > progress.tokens:
                if progress.tokens:
                    self._seen["inter_token_s"].observe(now - progress.at)
                else:
                    self._begun(request)
                self._generation_tokens += tokens - progress.tokens
                progress.tokens, progress.at = tokens, now
            if request.finish_reason is not None:
                self.ended(request)

    def ended(self, request: Timed) -> None:
        """It has a finish reason. One that has ended before does not end again."""
        if self._live.pop(request, None) is None or request.finish_reason is None:
            return
        self._finished[request.finish_reason] += 1
        if request.finish_reason not in ("stop", "length"):
            return
        later = len(request.output) - 1
        decoding = request.last_token_s - request.first_token_s
        self._seen["e2e_s"].observe(request.finished_s - request.arrival_s)
        self._seen["inference_s"].observe(request.finished_s - request.scheduled_s)
        self._seen["decode_s"].observe(decoding)
        if later > 0:
            self._seen["per_output_token_s"].observe(decoding / later)
        self._seen["prompt_length"].observe(len(request.prompt))
        self._seen["output_length"].observe(later + 1)

    def snapshot(self) -> RequestTotals:
        return RequestTotals(
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
            **{name: seen.snapshot() for name, seen in self._seen.items()},
        )

    def _begun(self, request: Timed) -> None:
        """Its first tokens have come."""
        self._prompt_tokens += len(request.prompt)
        self._seen["queue_s"].observe(request.scheduled_s - request.arrival_s)
        self._seen["prefill_s"].observe(request.first_token_s - request.scheduled_s)
        self._seen["first_token_s"].observe(request.first_token_s - request.arrival_s)


class LiveRequest(NamedTuple):
    """One continuation that has not ended. A tuple, as a frozen dataclass takes four times as long to make."""

    id: str
    state: Literal["running", "waiting"]
    prompt_tokens: int
    output_tokens: int
    drafted: int
    """Tokens drafted for it since it arrived; 0 if its caller wants no draft metrics."""
    accepted: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Totals since the engine was built, and what is there now. Plain values, taken between two steps."""

    counts: SpecCounts
    running: int
    waiting: int
    kv_blocks: int
    """Blocks of the KV cache."""
    kv_blocks_used: int
    """Blocks that running requests hold."""
    policy: str
    """Name of the policy; ``none`` without speculation."""
    longest_draft: int = 0
    """Most tokens that the policy may draft at once."""
    prefix_cache_queries: int = 0
    """Tokens of requests that were looked up in the prefix cache when they were seated first."""
    prefix_cache_hits: int = 0
    """Of these, tokens whose KV was there."""
    totals: RequestTotals = field(default_factory=lambda: RequestMeter().snapshot())
    steps: StepTotals = field(default_factory=lambda: StepMeter().snapshot())
    estimates: Mapping[str, Any] = field(default_factory=dict)
    """What the controller believes: see ``contract.step.Explains``. Empty if it does not say."""
    proposers: Mapping[str, bool] = field(default_factory=dict)
    """Configured proposers, and whether each is still switched on."""
    kept_text: KeptText | None = None
    """What suffix trees hold; None = there are none."""
    requests: tuple[LiveRequest, ...] = ()
    """In order of arrival."""
