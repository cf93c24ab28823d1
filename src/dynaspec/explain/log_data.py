"""A decision log as columns: one row a step, a request in a step, or a drafted token that was tested."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.signals import logit
from dynaspec.contract.step import Limits, SpecPlan, StepOutcome, StepView
from dynaspec.observe.decision_log import Header, Record, read_header, read_log
from dynaspec.observe.estimates import Estimates, Mode, Probe, ProposerEstimates, read_estimates

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

EMBEDDED = "dynaspec"
UNKNOWN = -1
"""In columns of counts: the host did not say."""


@dataclass(frozen=True, slots=True)
class LogSteps:
    """[S] Committed steps, in the order in which they were planned."""

    number: Ints
    requests: Ints
    """Decoding requests."""
    waiting: Ints
    prefill_rows: Ints
    passes: Ints
    """Drafter passes."""
    draft_rows: Ints
    """Rows of all drafter passes."""
    verify_rows: Ints
    kv_tokens: Ints
    """Σ over the target's rows of the KV entries that they see."""
    kv_read: Ints
    """Σ over decoding requests of their committed tokens."""
    emitted: Ints
    draft_s: Floats
    verify_s: Floats
    step_s: Floats
    expected_s: Floats
    """The controller's, as are the next ones; NaN where it does not say."""
    expected_tokens: Floats
    """Over all requests."""
    plain_goodput: Floats
    """Tokens/s expected of plain decoding."""
    draft_goodput: Floats
    """The same with drafts; 0 = nothing could be drafted."""
    token_price_s: Floats
    """Seconds that one more token was worth."""

    @property
    def expected_goodput(self) -> Floats:
        """[S] tokens/s"""
        return self.expected_tokens / self.expected_s

    @property
    def expected_speedup(self) -> Floats:
        """[S] Goodput with drafts over that of plain decoding; NaN where one of them is not known."""
        return np.where(self.draft_goodput > 0.0, self.draft_goodput, np.nan) / self.plain_goodput


@dataclass(frozen=True, slots=True)
class LogRows:
    """[N] Requests in committed steps."""

    step: Ints
    """Index into ``LogSteps``."""
    request: Ints
    """Index into ``LogData.requests``."""
    context: Ints
    room: Ints
    requested_max: Ints
    """Longest draft that the request asked for; UNKNOWN = it asked for none."""
    offer: Ints
    """Tokens that a lookup proposer had on offer; UNKNOWN = not a lookup proposer."""
    planned: Ints
    granted: Ints
    drafted: Ints
    verified: Ints
    accepted: Ints
    emitted: Ints
    proposer: Ints
    closed: Flags
    """Nothing was accepted behind ``accepted``: a token was rejected, or the request ended there."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """[T] Drafted tokens whose verdict is known: the accepted ones and the first rejected one of each draft."""

    request: Ints
    """Index into ``LogData.requests``."""
    position: Ints
    accepted: Flags
    confidence: Floats
    """NaN where the proposer has none."""
    estimate: Floats
    """The controller's probability of acceptance; NaN where it has none."""


@dataclass(frozen=True, slots=True)
class LogData:
    """All that the report is made of."""

    header: Header
    limits: Limits
    requests: tuple[str, ...]
    """Ids in order of appearance."""
    steps: LogSteps
    rows: LogRows
    verdicts: Verdicts
    modes: tuple[str, ...]
    """[S] What the controller called each decision; empty where it does not say."""
    reasons: tuple[str, ...]
    """[S] Those that the controller gave in words; empty where it gave none."""
    probes: tuple[Probe, ...]
    """Probes that began and ended within the log, in order."""
    given_up: int
    """Steps that were planned and never committed."""

    @property
    def host(self) -> str:
        """The engine that kept the log."""
        return host_of(self.header)

    @property
    def split(self) -> bool:
        """Drafting and verification were timed apart."""
        return bool(self.steps.draft_s.any() or self.steps.verify_s.any())


def host_of(header: Header) -> str:
    """The engine that wrote this header: dynaspec's own does not name itself."""
    return str(header.fields.get("host", EMBEDDED))


def load(*paths: Path) -> LogData:
    """Logs of one host, one behind the other, under the first one's header.

    Raises:
        ConfigError: a log cannot be read, or has no step that was committed; or they are of several hosts.
    """
    headers = [read_header(path) for path in paths]
    hosts = list(map(host_of, headers))
    collected = _Collected()
    for path, host in zip(paths, hosts, strict=True):
        if host != hosts[0]:
            raise ConfigError(f"{paths[0]} is a log of {hosts[0]} and {path} one of {host}; expected logs of one host")
        before = len(collected.steps)
        collected.add_all(read_log(path))
        if len(collected.steps) == before:
            raise ConfigError(f"{path} has no committed step; expected at least one to explain")
    if collected.limits is None:
        raise ConfigError("there is no decision log; expected one at least")
    return LogData(
        header=headers[0],
        limits=collected.limits,
        requests=tuple(collected.requests),
        steps=LogSteps(*_columns(collected.steps, LogSteps)),
        rows=LogRows(*_columns(collected.rows, LogRows)),
        verdicts=Verdicts(*_columns(collected.verdicts, Verdicts)),
        modes=tuple(collected.modes),
        reasons=tuple(collected.reasons),
        probes=tuple(collected.probes),
        given_up=collected.given_up,
    )


def most_used_proposer(data: LogData) -> int:
    """Index into ``Limits.proposers``; the first one where nothing was drafted."""
    used = data.rows.proposer[data.rows.drafted > 0]
    return int(np.bincount(used).argmax()) if used.size else 0


class _Probes:
    """The probes of one log, of which every step names the last one only."""

    def __init__(self) -> None:
        self.found: list[Probe] = []
        self._mode: Mode | None = None

    def add(self, estimates: Estimates) -> None:
        """The next step."""
        ended = self._mode in ("probe_plain", "probe_draft") and estimates.mode != self._mode
        self._mode = estimates.mode
        if estimates.last_probe is None:
            return
        if ended:
            self.found.append(estimates.last_probe)
        elif self.found:
            self.found[-1] = estimates.last_probe  # the steps after a probe may still change what it cost


class _Collected:
    """Rows of the tables, gathered step by step."""

    def __init__(self) -> None:
        self.limits: Limits | None = None
        self.requests: dict[str, int] = {}
        self.steps: list[tuple[float, ...]] = []
        self.rows: list[tuple[float, ...]] = []
        self.verdicts: list[tuple[float, ...]] = []
        self.modes: list[str] = []
        self.reasons: list[str] = []
        self.probes: list[Probe] = []
        self.given_up = 0

    def add_all(self, records: Iterable[Record]) -> None:
        """One log."""
        probes = _Probes()
        for record in records:
            self.limits = record.view.limits
            estimates = read_estimates(record.estimates)
            probes.add(estimates)
            if record.outcome is None:
                self.given_up += 1
            else:
                self._add(record, record.outcome, estimates)
        self.probes.extend(probes.found)

    def _add(self, record: Record, outcome: StepOutcome, estimates: Estimates) -> None:
        work = outcome.work
        context = dict(zip(record.view.ids, record.view.context_len, strict=True))
        self._add_rows(record, outcome, estimates)
        self.modes.append(_text(record.estimates.get("mode")))
        self.reasons.append(_text(record.estimates.get("reason")))
        self.steps.append(
            (
                record.step,
                len(outcome.ids),
                record.view.waiting,
                work.prefill_rows,
                len(work.rows_per_pass),
                sum(work.rows_per_pass),
                work.verify_rows,
                work.kv_tokens,
                sum(context.get(request, 0) for request in outcome.ids),
                sum(outcome.emitted),
                outcome.draft_s,
                outcome.verify_s,
                outcome.step_s,
                _known(estimates.expected_step_s),
                _known(estimates.expected_tokens),
                _known(estimates.plain_goodput),
                _known(estimates.draft_goodput),
                _known(estimates.token_price_s),
            )
        )

    def _add_rows(self, record: Record, outcome: StepOutcome, estimates: Estimates) -> None:
        view, plan = record.view, record.plan
        place = {request: i for i, request in enumerate(view.ids)}
        for i, request in enumerate(outcome.ids):
            at = place.get(request)
            planned = UNKNOWN if at is None else plan.depth[at]
            self.rows.append(
                (
                    len(self.steps),
                    self.requests.setdefault(request, len(self.requests)),
                    *_known_before(view, at, outcome.proposer[i]),
                    planned,
                    outcome.requested[i],
                    outcome.drafted[i],
                    outcome.verified[i],
                    outcome.accepted[i],
                    outcome.emitted[i],
                    outcome.proposer[i],
                    outcome.ended[i] in ("rejected", "stopped", "invalid"),
                )
            )
            self._add_verdicts(record, outcome, estimates, i, at)

    def _add_verdicts(self, record: Record, outcome: StepOutcome, estimates: Estimates, i: int, at: int | None) -> None:
        tested = outcome.accepted[i] + (outcome.ended[i] in ("rejected", "invalid"))
        index, confidence = self.requests[outcome.ids[i]], outcome.confidence[i]
        signal = outcome.signal[i] if outcome.signal else ()
        proposers, proposer = record.view.limits.proposers, outcome.proposer[i]
        name = proposers[proposer].name if 0 <= proposer < len(proposers) else ""
        expected = _expectation(record.plan, estimates.proposers.get(name), at)
        for j in range(tested):
            c = confidence[j] if j < len(confidence) else np.nan
            e = signal[j] if j < len(signal) else np.nan if np.isnan(c) else logit(c)
            self.verdicts.append(
                (index, j, j < outcome.accepted[i], c, np.nan if expected is None else expected.of(e, j))
            )


@dataclass(frozen=True, slots=True)
class _Expectation:
    """σ(weight · signal + bias[position] + offset): the chance that a token is accepted, by its signal."""

    weight: float
    bias: tuple[float, ...]
    offset: float

    def of(self, signal: float, position: int) -> float:
        bias = self.bias[min(position, len(self.bias) - 1)] if self.bias else 0.0
        return float(1 / (1 + np.exp(-(self.weight * signal + bias + self.offset))))


def _expectation(plan: SpecPlan, proposer: ProposerEstimates | None, at: int | None) -> _Expectation | None:
    """As the stop rule has it; else as the estimates of the proposer do."""
    stop = plan.stop
    if stop is not None and stop.signal == "survival":
        offset = stop.offset[at] if at is not None and at < len(stop.offset) else 0.0
        return _Expectation(stop.weight, stop.bias, offset)
    if proposer is None or proposer.signal is None:
        return None
    return _Expectation(proposer.signal.weight, proposer.signal.bias, 0.0)


def _known_before(view: StepView, at: int | None, proposer: int) -> tuple[int, int, int, int]:
    """Context, room, requested maximum and offer of one request."""
    if at is None:
        return 0, UNKNOWN, UNKNOWN, UNKNOWN
    requested_max = view.max_draft[at]
    offers = view.offers[proposer] if proposer < len(view.offers) else None
    offer = UNKNOWN if offers is None else offers[at][1]
    return view.context_len[at], view.room_depth[at], UNKNOWN if requested_max is None else requested_max, offer


def _known(number: float | None) -> float:
    return np.nan if number is None else number


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _columns(
    rows: list[tuple[float, ...]], kind: type[LogSteps] | type[LogRows] | type[Verdicts]
) -> list[npt.NDArray[Any]]:
    """The table's columns, each of the type that its field says."""
    names = kind.__dataclass_fields__
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
    types: dict[Any, Any] = {"Ints": np.int64, "Floats": np.float64, "Flags": np.bool_}
    return [table[:, i].astype(types[field.type]) for i, field in enumerate(names.values())]
