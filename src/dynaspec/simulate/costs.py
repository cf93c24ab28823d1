"""What a step costs: its load, the protocol, measured costs, and goodput profiles from a cost model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dynaspec.contract.costs import Curve, PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import ProposerTraits, Work
from dynaspec.control.estimate.costs import target_s
from dynaspec.control.profile import Profile

from .traces import Floats, Ints, Trace

_Points = tuple[Floats, Floats]
"""(rows [m], seconds [m]) as ``target_s`` takes them."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step's work as cost models price it; what ``Work`` says, and how it is spread over requests."""

    work: Work
    requests: int
    """Decoding requests."""
    context: int
    """Σ over the requests of the target pass, prefilling ones too, of the KV entries that each reads once."""
    drafting: tuple[int, ...] = ()
    """Requests that get a token from each drafter pass."""
    draft_context: tuple[int, ...] = ()
    """Σ over the requests of each drafter pass of the drafter's KV entries that it reads."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens of one request that are computed in a step."""

    start: int
    count: int


def step_load(
    traits: ProposerTraits,
    context: Ints,
    drafted: Ints,
    verified: Ints,
    ingested: Ints,
    chunks: Sequence[PrefillChunk] = (),
    *,
    kv_skipped: int = 0,
    kv_redone: int = 0,
) -> StepLoad:
    """
    Args:
        context: [B] committed tokens of the decoding requests.
        drafted: [B] tokens drafted.
        verified: [B] tokens of them that the target tests.
        ingested: [B] committed tokens that the drafter's first pass takes in; 0 where it does not run.
        kv_skipped, kv_redone: see ``Work``.
    """
    rows_per_pass, drafting, draft_context = _drafter_passes(traits, context, drafted, ingested)
    # Row j of a request (0-based) attends to context + j entries.
    decode_kv = int(((verified + 1) * context).sum() + (verified * (verified + 1) // 2).sum())
    chunk_kv = sum(c.count * c.start + c.count * (c.count + 1) // 2 for c in chunks)
    work = Work(
        rows_per_pass=rows_per_pass,
        verify_rows=int(verified.sum()) + len(context),
        kv_tokens=decode_kv + chunk_kv,
        prefill_rows=sum(c.count for c in chunks),
        kv_skipped=kv_skipped,
        kv_redone=kv_redone,
    )
    return StepLoad(
        work=work,
        requests=len(context),
        context=int((context + verified).sum()) + sum(c.start + c.count for c in chunks),
        drafting=drafting,
        draft_context=draft_context,
    )


def _drafter_passes(
    traits: ProposerTraits, context: Ints, drafted: Ints, ingested: Ints
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Rows, requests that get a token and KV entries read, for each pass."""
    if traits.passes_per_draft == "none":
        return (), (), ()
    starting = ingested > 0
    if not starting.any():
        return (), (), ()
    first_rows = int(ingested.sum())
    first_context = int(context[starting].sum())
    if traits.passes_per_draft == "one":
        return (first_rows,), (int((drafted > 0).sum()),), (first_context,)
    # alive[j]: requests with more than j drafted tokens, and the sum of their contexts.
    count = np.bincount(drafted)
    alive = count[::-1].cumsum()[::-1][1:]
    read = np.bincount(drafted, weights=context)[::-1].cumsum()[::-1][1:].astype(np.int64)
    later_rows, later_context = alive[1:], read[1:] + alive[1:] * np.arange(1, max(len(alive), 1))
    drafting = tuple(alive.tolist()) if len(alive) else (0,)
    return (
        (first_rows, *later_rows.tolist()),
        drafting,
        (first_context, *later_context.tolist()),
    )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step."""

    draft_s: float
    verify_s: float
    """The target pass, prefill chunks included."""
    other_s: float = 0.0
    """Scheduling, sampling and the like."""

    @property
    def step_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


class CostModel(Protocol):
    """Prices steps."""

    @property
    def name(self) -> str:
        """For tables and plots."""
        ...

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the KV memory holds; None = as many as need be."""
        ...

    def time(self, load: StepLoad) -> StepTime: ...

    def pass_costs(self) -> PassCosts:
        """What an engine would measure at its start; empty where passes cannot be told apart."""
        ...


class ProfileCosts:
    """Step times of a goodput profile: inter-token latency by batch size and draft length.

    A profile knows drafts of one length only. Where lengths differ, slot j adds what it adds to a batch of the b_j
    requests that draft it: ITL(B, 0) + Σ_j ITL(b_j, j) − ITL(b_j, j − 1), which for equal lengths is ITL(B, k). The
    rise with k is booked as drafting, as a profile does not separate the two.

    Args:
        prefill_ms: milliseconds a prompt token; None: what one more request adds to a plain step, on average between
            the smallest and the largest batch.
    """

    kv_tokens: int | None = None

    def __init__(self, profile: Profile, *, name: str = "profile", prefill_ms: float | None = None) -> None:
        self.name = name
        self._profile = profile
        self._prefill_ms = _row_ms(profile) if prefill_ms is None else prefill_ms
        self._least_ms = min(min(row.values()) for row in profile.batch_stats.values())
        self._known: dict[tuple[int, int], float] = {}

    def time(self, load: StepLoad) -> StepTime:
        plain = self._itl(load.requests, 0)
        rise = sum(
            self._itl(requests, k) - self._itl(requests, k - 1)
            for k, requests in enumerate(load.drafting, start=1)
            if requests
        )
        # Measured times need not ascend; a step is never faster than the fastest measured.
        draft_ms = max(rise, self._least_ms - plain)
        return StepTime(draft_s=draft_ms / 1e3, verify_s=(plain + load.work.prefill_rows * self._prefill_ms) / 1e3)

    def pass_costs(self) -> PassCosts:
        return PassCosts()

    def _itl(self, batch: int, k: int) -> float:
        key = (batch, k)
        value = self._known.get(key)
        if value is None:
            value = self._known[key] = self._profile.itl_ms(batch, k)
        return value


class CurveCosts:
    """Passes that cost what was measured by their rows; linear between, and beyond the ends with the last slope.

    Args:
        costs: a target curve, and a drafter's unless it runs no model.
        overhead_s: added to every step.
    """

    kv_tokens: int | None = None

    def __init__(self, costs: PassCosts, *, name: str = "measured", overhead_s: float = 0.0) -> None:
        self.name = name
        self._costs = costs
        self._overhead_s = overhead_s
        self._target = _points(_check_curve("target", costs.target))
        drafter = costs.drafters[0] if costs.drafters else ()
        self._drafter = _points(_check_curve("drafter", drafter)) if drafter else None

    @classmethod
    def load(cls, path: str | Path) -> CurveCosts:
        """Reads ``{"target": [[rows, seconds], …], "drafter": [[rows, seconds], …], "overhead_s": 0}``.

        Raises:
            ConfigError: a file that cannot be read, or is something else.
        """
        document = _read_object(Path(path))
        unknown = sorted(document.keys() - {"target", "drafter", "overhead_s"})
        if unknown:
            raise ConfigError(f"{path}: the key {unknown[0]!r} is unknown; expected target, drafter and overhead_s")
        overhead = document.get("overhead_s", 0.0)
        if not _is_number(overhead) or overhead < 0:
            raise ConfigError(f"{path}: overhead_s is {overhead!r}; expected seconds of at least 0")
        curves = {name: _curve(path, name, document.get(name, [])) for name in ("target", "drafter")}
        try:
            return cls(PassCosts(curves["target"], (curves["drafter"],)), name=Path(path).name, overhead_s=overhead)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def time(self, load: StepLoad) -> StepTime:
        draft_s = sum(_along(self._drafter, rows) for rows in load.work.rows_per_pass) if self._drafter else 0.0
        verify_s = _along(self._target, load.work.verify_rows + load.work.prefill_rows)
        return StepTime(draft_s=draft_s, verify_s=verify_s, other_s=self._overhead_s)

    def pass_costs(self) -> PassCosts:
        return self._costs


def _points(curve: Curve) -> _Points:
    """The curve with its first value from one row on, and its last slope (never a falling one) behind its end."""
    rows, seconds = (np.array(column, dtype=np.float64) for column in zip(*curve, strict=True))
    slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]) if rows.size > 1 else 0.0
    before = rows[:1] > 1.0
    return (
        np.concatenate([np.ones(1)[before], rows, rows[-1:] + 1.0]),
        np.concatenate([seconds[:1][before], seconds, seconds[-1:] + max(0.0, slope)]),
    )


def _along(points: _Points, rows: int) -> float:
    return float(target_s(*points, max(rows, 1)))


def _check_curve(name: str, curve: Curve) -> Curve:
    if not curve:
        raise ConfigError(f"the {name} curve is empty; expected at least one (rows, seconds)")
    if curve[0][0] < 1 or any(a >= b for (a, _), (b, _) in pairwise(curve)):
        raise ConfigError(f"the {name} curve's rows are {[rows for rows, _ in curve]}; expected them to ascend from 1")
    bad = [seconds for _, seconds in curve if not 0.0 < seconds < math.inf]
    if bad:
        raise ConfigError(f"the {name} curve has the time {bad[0]}; expected seconds above 0")
    return curve


def _curve(path: str | Path, name: str, value: object) -> Curve:
    error = ConfigError(f"{path}: {name} is no list of [rows, seconds] pairs")
    if not isinstance(value, list):
        raise error
    pairs = []
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) and _is_number(pair[1])):
            raise error
        pairs.append((pair[0], float(pair[1])))
    return tuple(pairs)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the costs {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"the costs {str(path)!r} are no JSON") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: the costs are no JSON object; expected one with target and drafter")
    return document


def _row_ms(profile: Profile) -> float:
    sizes = tuple(profile.batch_stats)
    low, high = sizes[0], sizes[-1]
    if low == high:
        return profile.itl_ms(low, 0) / low
    return max(0.0, (profile.itl_ms(high, 0) - profile.itl_ms(low, 0)) / (high - low))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def profile_of(
    costs: CostModel, trace: Trace, traits: ProposerTraits, *, batches: Iterable[int], longest: int
) -> Profile:
    """What ``dynaspec profile`` would measure: step times by batch size and draft length, and the trace's acceptance.

    Every request is taken to have the context that the trace has on average half-way through a request, and nothing
    is prefilled meanwhile.

    Args:
        longest: the profile speaks for k = 0 … ``longest``.
    """
    context = int((trace.prompt + trace.output / 2).mean())
    stats = {
        batch: {k: _step_ms(costs, traits, batch, context, k) for k in range(longest + 1)}
        for batch in sorted(set(batches))
    }
    return Profile(
        batch_stats=stats,
        acceptance_rate_per_pos=tuple(round(rate, 4) for rate in trace.survival(longest).tolist()),
        max_num_speculative_tokens=longest,
    )


def with_acceptance(profile: Profile, conditional: float) -> Profile:
    """The profile at a constant conditional acceptance a: a, a², a³, …"""
    longest = profile.max_num_speculative_tokens
    rates = tuple(conditional**j for j in range(1, longest + 1))
    return replace(profile, acceptance_rate_per_pos=rates)


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, … and ``most``."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def _step_ms(costs: CostModel, traits: ProposerTraits, batch: int, context: int, k: int) -> float:
    contexts, lens = np.full(batch, context), np.full(batch, k)
    # After a step the drafter lacks the last token at least; that is what its first pass takes in.
    ingested = np.full(batch, min(k, 1))
    return round(1e3 * costs.time(step_load(traits, contexts, lens, lens, ingested)).step_s, 4)
