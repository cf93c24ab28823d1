"""Traces from decision logs, and logs replayed through a controller."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Controller, SpecPlan, StepOutcome, StepView
from dynaspec.control.estimate.acceptance import AcceptanceModel
from dynaspec.control.estimate.settings import AutoSettings
from dynaspec.observe.decision_log import ForgetCall, ObserveCall, PlanCall, TrimCall, read_calls, read_log
from dynaspec.result_output import write_text

from .traces import Floats, Trace, build_trace, runs_of

_KEYS = ("prompt_tokens", "runs", "confidence", "stray", "max_tokens", "arrival_s")
_SETTINGS = AutoSettings(memory=1e9, surprise=1e9, request_shrinkage=4.0)
"""Nothing is forgotten. A request's own acceptance counts as much as the others' once it has some eight verdicts."""
_EPOCHS = 2
"""In the last, requests are held against an average that is known by then."""


def load_trace(path: str | Path, rng: np.random.Generator) -> Trace:
    """Reads either kind of file; a decision log says what it is in its first line.

    Args:
        rng: fills in what a decision log does not know, see ``from_decision_logs``.

    Raises:
        ConfigError: a file that cannot be read or is neither; one sentence with the line.
    """
    path = Path(path)
    first = next(_objects(path), None)
    if first is None:
        raise ConfigError(f"the trace {str(path)!r} is empty; expected a JSON object a line")
    return from_decision_logs([path], rng) if "format" in first[1] else from_jsonl(path)


def from_jsonl(path: str | Path) -> Trace:
    """Reads one request a line, as ``save_trace`` writes them.

    ``runs[t]`` is the number of drafted tokens that are accepted when t output tokens are there, so there are as many
    as output tokens. ``confidence`` and ``stray`` have one entry for each of them, for every request or for none.

    Raises:
        ConfigError: a malformed file; the message names the line and the key.
    """
    path = Path(path)
    lines = [_checked(path, number, line) for number, line in _objects(path)]
    columns = {key: [line[key] for line in lines if key in line] for key in _KEYS}
    for key in _KEYS:
        if len(columns[key]) not in (0, len(lines)):
            raise ConfigError(f"{path}: {len(columns[key])} of {len(lines)} requests have {key}; expected all or none")
    times = columns["arrival_s"]
    if any(later < earlier for earlier, later in pairwise(times)):
        raise ConfigError(f"{path}: arrival_s falls from one request to the next; expected the order of arrival")
    try:
        return build_trace(
            np.array(columns["prompt_tokens"], dtype=np.int64),
            np.array([len(runs) for runs in columns["runs"]], dtype=np.int64),
            np.array(list(chain(*columns["runs"])), dtype=np.int64),
            max_tokens=np.array(columns["max_tokens"], dtype=np.int64) if columns["max_tokens"] else None,
            confidence=_joined(columns["confidence"]),
            stray=_joined(columns["stray"]),
            arrival_s=np.array(times, dtype=np.float64) if times else None,
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def save_trace(trace: Trace, path: str | Path) -> None:
    """Writes the file that ``from_jsonl`` reads.

    Raises:
        ConfigError: it cannot be written.
    """
    write_text(Path(path), "".join(json.dumps(_line(trace, i)) + "\n" for i in range(len(trace))))


def from_decision_logs(paths: Sequence[str | Path], rng: np.random.Generator) -> Trace:
    """Reconstructs a trace from what an engine drafted and verified.

    Every verified draft tells of the positions that it covers: its tokens up to the first rejection were tested
    against the true text. Nothing is known of the target's own token after a draft that was accepted whole, of plain
    steps, and of what a grammar or an end cut off. There, acceptance is drawn with the request's rate, shrunk towards
    that of all, and the confidence from those observed with the same verdict. So a log of long drafts makes a good
    trace, one of short drafts a smoothed one. Only drafts of the first proposer count; those of trees do not. Of
    several logs, those without any verified draft are left out.

    Args:
        rng: for the positions that nothing is known of.

    Raises:
        ConfigError: no readable decision log, or none with a verified draft.
    """
    requests = list(chain.from_iterable(_requests(path) for path in paths))
    if not any(request.verdicts for request in requests):
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names}: no draft was verified; expected a log of an engine that speculates")
    return _Filler(requests, rng).trace()


@dataclass(slots=True)
class _Seen:
    """What a log tells of one request. Positions are counted in output tokens."""

    prompt: int
    max_tokens: int
    length: int = 1
    verdicts: dict[int, bool] = field(default_factory=dict)
    confidence: dict[int, float] = field(default_factory=dict)
    strays: list[float] = field(default_factory=list)
    """Confidences behind a rejection."""


def _requests(path: str | Path) -> list[_Seen]:
    """Those of one log; none where nothing was verified."""
    seen: dict[str, _Seen] = {}
    for record in read_log(path):
        if record.outcome is not None:
            _take_in(seen, record.view, record.outcome)
    return list(seen.values()) if any(request.verdicts for request in seen.values()) else []


def _take_in(seen: dict[str, _Seen], view: StepView, outcome: StepOutcome) -> None:
    place = {name: i for i, name in enumerate(view.ids)}
    for i, name in enumerate(outcome.ids):
        if name not in place:
            continue
        at = place[name]
        context, room = view.context_len[at], view.room_depth[at]
        # The first token came with the prompt's last chunk, before the request was first seen.
        request = seen.setdefault(name, _Seen(prompt=context - 1, max_tokens=room + 2))
        position = context - request.prompt
        request.length = max(request.length, position + outcome.emitted[i])
        if outcome.proposer[i] == 0:
            _take_in_draft(request, position, outcome, i)


def _take_in_draft(request: _Seen, position: int, outcome: StepOutcome, i: int) -> None:
    accepted, rejected = outcome.accepted[i], outcome.ended[i] in ("rejected", "invalid")
    signal = outcome.confidence[i]
    for slot in range(accepted + rejected):
        request.verdicts[position + slot] = slot < accepted
        if slot < len(signal) and 0.0 <= signal[slot] <= 1.0:
            request.confidence[position + slot] = signal[slot]
    if rejected:
        request.strays.extend(value for value in signal[accepted + 1 :] if 0.0 <= value <= 1.0)


class _Filler:
    """Draws what a log does not know."""

    def __init__(self, requests: Sequence[_Seen], rng: np.random.Generator) -> None:
        self._requests = requests
        self._rng = rng
        pairs = [(r.verdicts[at], value) for r in requests for at, value in r.confidence.items()]
        self._pools = {
            verdict: np.array([value for found, value in pairs if found == verdict]) for verdict in (True, False)
        }
        self._everything = np.array([value for _, value in pairs])
        self._strays = np.array(list(chain.from_iterable(r.strays for r in requests)))

    def trace(self) -> Trace:
        output = np.array([request.length for request in self._requests], dtype=np.int64)
        rates = _acceptance([list(request.verdicts.values()) for request in self._requests]).tolist()
        known = zip(self._requests, rates, strict=True)
        accepted = np.concatenate([self._verdicts(request, rate) for request, rate in known])
        signals = len(self._everything) > 0
        limit = np.array([request.max_tokens for request in self._requests], dtype=np.int64)
        return build_trace(
            np.array([max(1, request.prompt) for request in self._requests], dtype=np.int64),
            output,
            runs_of(accepted, output),
            max_tokens=np.maximum(limit, output),
            confidence=self._confidence(accepted, output) if signals else None,
            stray=self._draw(self._strays, len(accepted)) if signals else None,
        )

    def _verdicts(self, request: _Seen, rate: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
        accepted = self._rng.random(request.length) < rate
        for at, verdict in request.verdicts.items():
            if at < request.length:
                accepted[at] = verdict
        return accepted

    def _confidence(self, accepted: np.ndarray[Any, np.dtype[np.bool_]], output: np.ndarray[Any, Any]) -> Floats:
        size = len(accepted)
        values = np.where(accepted, self._draw(self._pools[True], size), self._draw(self._pools[False], size))
        first = np.cumsum(output) - output
        for start, request in zip(first.tolist(), self._requests, strict=True):
            for at, value in request.confidence.items():
                if at < request.length:
                    values[start + at] = value
        return values

    def _draw(self, pool: Floats, size: int) -> Floats:
        return self._rng.choice(pool if len(pool) else self._everything, size)


def _acceptance(verdicts: Sequence[Sequence[bool]]) -> Floats:
    """[requests] chance that a token of each is accepted, wherever it stands in a draft, from its verdicts.

    They are taught in turns, one of each request after the other, so that no request is learnt before the average is.
    """
    size = np.array([len(of_one) for of_one in verdicts], dtype=np.int64)
    request = np.repeat(np.arange(size.size), size)
    order = np.argsort(np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size), kind="stable")
    right = np.fromiter(chain.from_iterable(verdicts), dtype=np.int64, count=int(size.sum()))[order]
    model = AcceptanceModel(_SETTINGS, signal=False)
    for _ in range(_EPOCHS):
        for slot in range(size.size):
            model.admit(slot)
        one = np.ones_like(right)
        model.observe(request[order], one, one, right, np.zeros(right.size))
    return np.asarray(1.0 / (1.0 + np.exp(-model.biases()[0] - model.offsets(np.arange(size.size)))), dtype=np.float64)


def _line(trace: Trace, i: int) -> dict[str, Any]:
    start, stop = int(trace.first[i]), int(trace.first[i] + trace.output[i])
    line: dict[str, Any] = {
        "prompt_tokens": int(trace.prompt[i]),
        "max_tokens": int(trace.max_tokens[i]),
        "runs": trace.runs[start:stop].tolist(),
    }
    for name, signal in (("confidence", trace.confidence), ("stray", trace.stray)):
        if signal is not None:
            line[name] = [round(value, 4) for value in signal[start:stop].tolist()]
    if trace.arrival_s is not None:
        line["arrival_s"] = float(trace.arrival_s[i])
    return line


def _checked(path: Path, number: int, line: Mapping[str, Any]) -> Mapping[str, Any]:
    where = f"{path}, line {number}"
    unknown = [key for key in line if key not in _KEYS]
    if unknown:
        raise ConfigError(f"{where}: the key {unknown[0]!r} is unknown; expected keys among {', '.join(_KEYS)}")
    for key in ("prompt_tokens", "runs"):
        if key not in line:
            raise ConfigError(f"{where}: there is no {key}; expected prompt_tokens and runs for every request")
    for key in ("prompt_tokens", "max_tokens"):
        if key in line and not (_is_integer(line[key]) and line[key] >= 1):
            raise ConfigError(f"{where}: {key} is {line[key]!r}; expected an integer of at least 1")
    runs = line["runs"]
    if not isinstance(runs, list) or not runs or not all(map(_is_integer, runs)):
        raise ConfigError(f"{where}: runs is no list of integers; expected one for each output token")
    for key in ("confidence", "stray"):
        signal = line.get(key, [0.0] * len(runs))
        if not isinstance(signal, list) or len(signal) != len(runs) or not all(map(_is_number, signal)):
            raise ConfigError(f"{where}: {key} is no list of {len(runs)} numbers; expected one for each run")
    if not _is_number(line.get("arrival_s", 0.0)):
        raise ConfigError(f"{where}: arrival_s is {line['arrival_s']!r}; expected seconds")
    return line


def _objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, object) of every line that is not blank."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except ValueError:
                    raise ConfigError(f"{path}, line {number}: it is no JSON; expected an object a line") from None
                if not isinstance(line, dict):
                    raise ConfigError(f"{path}, line {number}: it is no JSON object; expected one a line")
                yield number, line
    except UnicodeDecodeError:
        raise ConfigError(f"the trace {str(path)!r} is no text; expected JSON lines") from None
    except OSError as error:
        raise ConfigError(f"the trace {str(path)!r} cannot be read: {error.strerror}") from None


def _joined(columns: Sequence[Sequence[float]]) -> Floats | None:
    return np.array(list(chain(*columns)), dtype=np.float64) if columns else None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Difference:
    """A call whose answer differs from the recorded one."""

    line: int
    """Of the log."""
    step: int
    call: Literal["plan", "trim"]
    recorded: SpecPlan
    replayed: SpecPlan

    def __str__(self) -> str:
        fields = [
            f"{name} was {before!r} and is {now!r}"
            for name in SpecPlan.__dataclass_fields__
            if (before := getattr(self.recorded, name)) != (now := getattr(self.replayed, name))
        ]
        return f"line {self.line}, {self.call} of step {self.step}: {'; '.join(fields)}"


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """How a controller did on a recorded log."""

    plans: int
    """``plan`` calls replayed."""
    trims: int
    different: int
    """Answers that were not the recorded ones."""
    first: Difference | None
    """The first of them. Later ones may be its consequence: the recorded outcome is not that of the new plan."""

    @property
    def identical(self) -> bool:
        return self.different == 0


def replay(path: str | Path, controller: Controller) -> ReplayResult:
    """Makes the recorded calls in their order, whatever the controller answers, and compares the answers.

    Args:
        controller: as it was when the recording began: freshly built, with the same configuration, seed and costs.

    Raises:
        ConfigError: the log cannot be read or is malformed.
    """
    plans = trims = different = 0
    first: Difference | None = None
    for call in read_calls(path):
        match call:
            case PlanCall():
                plans += 1
                found = _compared(call, "plan", call.plan, controller.plan(call.view))
            case TrimCall():
                trims += 1
                found = _compared(call, "trim", call.trimmed, controller.trim(call.view, call.plan, call.drafts))
            case ObserveCall():
                controller.observe(call.outcome)
                continue
            case ForgetCall():
                controller.forget(call.ids)
                continue
        if found is not None:
            different += 1
            first = first or found
    return ReplayResult(plans, trims, different, first)


def _compared(
    call: PlanCall | TrimCall, name: Literal["plan", "trim"], recorded: SpecPlan, replayed: SpecPlan
) -> Difference | None:
    return None if replayed == recorded else Difference(call.line, call.step, name, recorded, replayed)
