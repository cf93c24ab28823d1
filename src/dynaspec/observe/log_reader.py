"""Decision logs read back: call by call for replay, step by step for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView

from . import codec
from .codec import FORMAT, OPEN_STEPS, VERSION


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line says."""

    dynaspec: str
    """Version that wrote the log."""
    fields: Mapping[str, Any]
    """What the host wanted to have in it."""
    seed: int = 0
    """The controller's; 0 where the host did not say."""
    costs: PassCosts | None = None
    """Pass costs measured at start-up, if any."""

    @property
    def speculative_config(self) -> Any:
        """As it was given; None where the host did not say."""
        return self.fields.get("speculative_config")


@dataclass(frozen=True, slots=True)
class PlanCall:
    line: int
    step: int
    view: StepView
    plan: SpecPlan
    """What the controller answered."""
    estimates: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrimCall:
    line: int
    step: int
    view: StepView
    plan: SpecPlan
    """As the host granted it."""
    drafts: DraftView
    trimmed: SpecPlan
    """What the controller answered."""


@dataclass(frozen=True, slots=True)
class ObserveCall:
    line: int
    step: int
    outcome: StepOutcome


@dataclass(frozen=True, slots=True)
class ForgetCall:
    line: int
    ids: tuple[str, ...]


Call = PlanCall | TrimCall | ObserveCall | ForgetCall


@dataclass(frozen=True, slots=True)
class Record:
    """One step, from all calls about it."""

    step: int
    view: StepView
    """As it was drafted for; some of the requests planned for may have left by then."""
    plan: SpecPlan
    """As the controller made it, for the requests of ``view``."""
    trimmed: SpecPlan | None = None
    """None: the step was given up before it drafted. Else the plan as verified."""
    drafts: DraftView | None = None
    outcome: StepOutcome | None = None
    """None: the step was not committed, or not before the log ends."""
    estimates: Mapping[str, Any] = field(default_factory=dict)


def read_header(path: str | Path) -> Header:
    """
    Raises:
        ConfigError: no readable decision log of a known version.
    """
    _, content = next(_lines(Path(path)))
    return _header(Path(path), content)


def read_calls(path: str | Path) -> Iterator[Call]:
    """All calls, in the order in which the controller was called.

    A last line without its end is that of a log still being written, or cut off by a crash: it is left out.

    Raises:
        ConfigError: the file cannot be read or is malformed; the message names file and line.
    """
    path = Path(path)
    lines = _lines(path)
    _header(path, next(lines)[1])
    decoder = _Decoder()
    for number, content in lines:
        try:
            call = decoder.decode(number, content)
        except KeyError as error:
            raise _malformed(path, number, f"the field {error} is missing") from None
        except (TypeError, ValueError) as error:
            raise _malformed(path, number, str(error)) from None
        if call is not None:
            yield call


def read_log(path: str | Path) -> Iterator[Record]:
    """All steps in the order in which they were planned; late outcomes are waited for.

    Raises:
        ConfigError: see ``read_calls``.
    """
    pending: dict[int, Record] = {}
    for call in read_calls(path):
        match call:
            case PlanCall():
                pending[call.step] = Record(call.step, call.view, call.plan, estimates=call.estimates)
            case TrimCall() if call.step in pending:
                pending[call.step] = _drafted(pending[call.step], call)
            case ObserveCall() if call.step in pending:
                pending[call.step] = replace(pending[call.step], outcome=call.outcome)
        while pending and (len(pending) > OPEN_STEPS or next(iter(pending.values())).outcome is not None):
            yield pending.pop(next(iter(pending)))
    yield from pending.values()


class _Decoder:
    """Fills in what lines leave out because an earlier one has said it."""

    def __init__(self) -> None:
        self._limits: Limits | None = None
        self._planned: dict[int, tuple[StepView, SpecPlan]] = {}
        self._drafted: dict[int, tuple[tuple[str, ...], DraftView]] = {}

    def decode(self, line: int, content: Mapping[str, Any]) -> Call | None:
        match content["call"]:
            case "limits":
                self._limits = codec.decode_limits(_object(content, "limits"))
                return None
            case "plan":
                return self._plan(line, content)
            case "trim":
                return self._trim(line, content)
            case "observe":
                return self._observe(line, content)
            case "forget":
                return ForgetCall(line, tuple(map(str, content["ids"])))
            case other:
                raise ValueError(f"call is {other!r}; expected limits, plan, trim, observe or forget")

    def _plan(self, line: int, content: Mapping[str, Any]) -> PlanCall:
        view, plan = self._view(content), codec.decode_plan(_object(content, "plan"))
        estimates = _object(content, "estimates") if "estimates" in content else {}
        _prune(self._planned)
        self._planned[view.step] = view, plan
        return PlanCall(line, view.step, view, plan, codec.restored(estimates))

    def _trim(self, line: int, content: Mapping[str, Any]) -> TrimCall:
        step = content["step"]
        view, plan = self._planned.get(step, (None, None))
        if "view" in content:
            view = self._view(content)
        if "granted" in content:
            plan = codec.decode_plan(_object(content, "granted"), plan)
        if view is None or plan is None:
            raise ValueError(f"step {step} is trimmed; expected it to be planned on an earlier line")
        drafts = codec.decode_drafts(_object(content, "drafts"))
        trimmed = codec.decode_plan(_object(content, "trimmed"), plan) if "trimmed" in content else plan
        _prune(self._drafted)
        self._drafted[step] = view.ids, drafts
        return TrimCall(line, step, view, plan, drafts, trimmed)

    def _observe(self, line: int, content: Mapping[str, Any]) -> ObserveCall:
        step, columns = content["step"], dict(_object(content, "outcome"))
        view, _ = self._planned.pop(step, (None, None))
        ids, drafts = self._drafted.pop(step, (None if view is None else view.ids, None))
        if ids is not None:
            columns.setdefault("ids", ids)
        if drafts is not None:
            columns.setdefault("confidence", drafts.confidence)
            columns.setdefault("signal", drafts.signal)
        return ObserveCall(line, step, codec.decode_outcome({**columns, "plan_step": step}))

    def _view(self, content: Mapping[str, Any]) -> StepView:
        if self._limits is None:
            raise ValueError("a view comes before any limits; expected a line with call 'limits' first")
        return codec.decode_view(_object(content, "view"), self._limits)


def _object(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content[name]
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}; expected a JSON object")
    return value


def _drafted(record: Record, call: TrimCall) -> Record:
    """With what was drafted; its columns are those of the requests still there then."""
    plan = record.plan
    if call.view.ids != record.view.ids:
        plan = plan.select(_places(record.view.ids, call.view.ids))
    return replace(record, view=call.view, plan=plan, trimmed=call.trimmed, drafts=call.drafts)


def _places(ids: Sequence[str], kept: Sequence[str]) -> list[int]:
    place = {request: i for i, request in enumerate(ids)}
    return [place[request] for request in kept]


def _prune(steps: dict[int, Any]) -> None:
    """The writer forgets steps too, and in the same order: what it refers to is still here."""
    while len(steps) >= OPEN_STEPS:
        del steps[next(iter(steps))]


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, content) of every whole line; at least one."""
    complete = False
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break
                try:
                    content = json.loads(text)
                except ValueError:
                    raise _malformed(path, number, "it is no JSON") from None
                if not isinstance(content, dict):
                    raise _malformed(path, number, f"it holds {type(content).__name__}; expected a JSON object")
                complete = True
                yield number, content
    except OSError as error:
        raise ConfigError(f"the decision log {path} cannot be read: {error.strerror}") from None
    if not complete:
        raise ConfigError(f"{path} holds no complete line; expected a decision log")


def _header(path: Path, content: Mapping[str, Any]) -> Header:
    if content.get("format") != FORMAT:
        raise ConfigError(f"{path}, line 1: it is no decision log's header; expected the format {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ConfigError(f"{path}, line 1: the version is {content.get('version')!r}; expected {VERSION}")
    try:
        fields = codec.restored(_object(content, "header"))
        seed, costs = fields.get("seed") or 0, fields.get("costs")
        if not isinstance(seed, int):
            raise ValueError(f"seed is {seed!r}; expected an integer")
        decoded = None if costs is None else codec.decode_costs(_object(fields, "costs"))
    except KeyError as error:
        raise _malformed(path, 1, f"the field {error} is missing") from None
    except ValueError as error:
        raise _malformed(path, 1, str(error)) from None
    return Header(str(content.get("dynaspec", "unknown")), fields, seed, decoded)


def _malformed(path: Path, line: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {line}: {what}")
