"""Everything a controller was asked and told, as JSON lines: for replay and for people.

The first line is the header. Then one line a call, in the order in which the controller was called::

    {"call": "limits",  …}                                    before the first view, and whenever they change
    {"call": "plan",    "step": 7, "view": …, "plan": …, "estimates": …}
    {"call": "trim",    "step": 7, "drafts": …, "trimmed": …}   with "view" and "granted" where they are not the plan's
    {"call": "observe", "step": 7, "outcome": …}
    {"call": "forget",  "ids": […]}

It is read back call by call for replay, and step by step for people. ``docs/explain.md`` describes it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Controller, DraftView, Explains, Limits, SpecPlan, StepOutcome, StepView
from dynaspec.version import __version__

_logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 18
_T = TypeVar("_T")

_FORMAT = "dynaspec-decision-log"
_VERSION = 2
"""Grows when a reader of the version before would misread the file; fields may be added without."""
_OPEN_STEPS = 64
"""Planned steps that writer and reader remember until they are observed; a host gives some up without a word."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no such numbers; as strings they pass through every reader, and become floats again here."""
_OUTCOME_COLUMNS = (
    *("proposer", "requested", "drafted", "verified", "accepted"),
    *("emitted", "ended", "early_exit", "confidence"),
)
_LIMITS = TypeAdapter(Limits)
_VIEW = TypeAdapter(StepView)
_PLAN = TypeAdapter(SpecPlan)
_DRAFTS = TypeAdapter(DraftView)
_OUTCOME = TypeAdapter(StepOutcome)
_COSTS = TypeAdapter(PassCosts)
_ESCAPING = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class DecisionLog:
    """A file of JSON lines. Once open it never raises: if writing fails it says so once and stops.

    Args:
        path: written anew.
        header: goes into the first line. Replay looks for ``speculative_config`` (as it was given), ``seed`` and
            ``costs`` (``PassCosts``) there; hosts may add what they like, as JSON values.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any] | None = None) -> None:
        self._path = Path(path)
        try:
            self._file: BinaryIO | None = self._path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(f"the decision log {self._path} cannot be written: {error.strerror}") from None
        first = {"format": _FORMAT, "version": _VERSION, "dynaspec": __version__, "header": dict(header or {})}
        self.write(lambda: first)

    @property
    def open(self) -> bool:
        """Whether lines are still written."""
        return self._file is not None

    def write(self, line: Callable[[], Mapping[str, Any]]) -> None:
        """Appends a line; it is made only while the log is open."""
        if self._file is None:
            return
        try:
            self._file.write(_dumps(line()) + b"\n")
        except Exception as error:  # whatever it is, it must not cost a request
            self._give_up(error)

    def flush(self) -> None:
        """Writes what is buffered, for a process that may end without closing."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes what is buffered; further lines are dropped."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            _logger.error("decision log %s: its end is lost: %s", self._path, error)

    def _give_up(self, error: Exception) -> None:
        _logger.error("decision log %s: stopped: %s", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:  # the disk that failed just now, fails again
                _logger.debug("decision log %s: its buffer is lost", self._path)


def header_of(
    model: str, config: BaseModel | None, *, seed: int | None = 0, costs: PassCosts | None = None, **more: Any
) -> dict[str, Any]:
    """For a log's first line: what a replay builds the same controller from.

    Args:
        model: the target.
        config: how it speculates; None = not at all.
        seed: the engine's.
        more: of the host.
    """
    told = None if config is None else config.model_dump(mode="json", exclude_none=True)
    measured = {} if costs is None else {"costs": asdict(costs)}
    return {"model": model, "speculative_config": told, "seed": seed, **more, **measured}


def logged(
    controller: Controller, path: str | Path | None, header: Mapping[str, Any]
) -> tuple[Controller, DecisionLog | None]:
    """The controller with a log around it, and the log; without a path the controller itself.

    Raises:
        ConfigError: the file cannot be created.
    """
    if path is None:
        return controller, None
    log = DecisionLog(path, header)
    return LoggedController(controller, log), log


@dataclass(slots=True)
class _Open:
    """A step that has been planned and not observed yet."""

    view: StepView
    plan: SpecPlan
    ids: tuple[str, ...]
    drafts: DraftView | None = None


class LoggedController:
    """A controller whose calls are logged. Calls from several threads go to it one after the other."""

    def __init__(self, inner: Controller, log: DecisionLog) -> None:
        self._inner = inner
        self._log = log
        # Asynchronous hosts trim one step while they plan the next. The log's order must be the true one.
        self._lock = threading.Lock()
        self._limits: Limits | None = None
        self._open: dict[int, _Open] = {}

    def plan(self, view: StepView) -> SpecPlan:
        with self._lock:
            plan = self._inner.plan(view)
            if self._log.open:
                self._remember(view, plan)
                self._log.write(lambda: self._plan_line(view, plan))
            return plan

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        with self._lock:
            trimmed = self._inner.trim(view, plan, drafts)
            if self._log.open:
                self._log.write(lambda: self._trim_line(view, plan, drafts, trimmed))
            return trimmed

    def observe(self, outcome: StepOutcome) -> None:
        with self._lock:
            self._inner.observe(outcome)
            if self._log.open:
                self._log.write(lambda: self._outcome_line(outcome))

    def forget(self, ids: Sequence[str]) -> None:
        with self._lock:
            self._inner.forget(ids)
            if ids and self._log.open:
                self._log.write(lambda: {"call": "forget", "ids": tuple(ids)})

    def estimates(self) -> Mapping[str, Any]:
        """The inner controller's; empty where it has none."""
        with self._lock:
            return self._estimates()

    def _estimates(self) -> Mapping[str, Any]:
        return self._inner.estimates() if isinstance(self._inner, Explains) else {}

    def _remember(self, view: StepView, plan: SpecPlan) -> None:
        if view.limits is not self._limits and view.limits != self._limits:
            self._log.write(lambda: {"call": "limits", "limits": view.limits})
        self._limits = view.limits
        if len(self._open) >= _OPEN_STEPS:
            del self._open[next(iter(self._open))]
        self._open[view.step] = _Open(view, plan, view.ids)

    def _plan_line(self, view: StepView, plan: SpecPlan) -> dict[str, Any]:
        line = {"call": "plan", "step": view.step, "view": _encode_view(view), "plan": _encode_plan(plan)}
        estimates = self._estimates()
        return {**line, "estimates": estimates} if estimates else line

    def _trim_line(self, view: StepView, plan: SpecPlan, drafts: DraftView, trimmed: SpecPlan) -> dict[str, Any]:
        line: dict[str, Any] = {"call": "trim", "step": plan.step}
        planned = self._open.get(plan.step)
        if planned is None or (view is not planned.view and view != planned.view):
            line["view"] = _encode_view(view)
        if planned is None:
            line["granted"] = _encode_plan(plan)
        elif plan is not planned.plan and plan != planned.plan:
            line["granted"] = _encode_change(plan, planned.plan)
        line["drafts"] = _encode_drafts(drafts)
        if trimmed is not plan and trimmed != plan:
            line["trimmed"] = _encode_change(trimmed, plan)
        if planned is not None:
            planned.ids, planned.drafts = view.ids, drafts
        return line

    def _outcome_line(self, outcome: StepOutcome) -> dict[str, Any]:
        columns = _encode_outcome(outcome)
        step = columns.pop("plan_step")
        planned = self._open.pop(step, None)
        if planned is not None and planned.ids == outcome.ids:
            del columns["ids"]
        if planned is not None and planned.drafts is not None:
            for signal in ("confidence", "signal"):
                if getattr(planned.drafts, signal) == getattr(outcome, signal):
                    del columns[signal]
        return {"call": "observe", "step": step, "outcome": columns}


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


def is_log(path: Path) -> bool:
    """Whether a file begins as decision logs do.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        return False
    return isinstance(first, dict) and first.get("format") == _FORMAT


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
        while pending and (len(pending) > _OPEN_STEPS or next(iter(pending.values())).outcome is not None):
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
                self._limits = _decoded(_LIMITS, _object(content, "limits"))
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
        view, plan = self._view(content), _decode_plan(_object(content, "plan"))
        estimates = _object(content, "estimates") if "estimates" in content else {}
        _prune(self._planned)
        self._planned[view.step] = view, plan
        return PlanCall(line, view.step, view, plan, _restored(estimates))

    def _trim(self, line: int, content: Mapping[str, Any]) -> TrimCall:
        step = content["step"]
        view, plan = self._planned.get(step, (None, None))
        if "view" in content:
            view = self._view(content)
        if "granted" in content:
            plan = _decode_plan(_object(content, "granted"), plan)
        if view is None or plan is None:
            raise ValueError(f"step {step} is trimmed; expected it to be planned on an earlier line")
        drafts = _decode_drafts(_object(content, "drafts"))
        trimmed = _decode_plan(_object(content, "trimmed"), plan) if "trimmed" in content else plan
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
        return ObserveCall(line, step, _decode_outcome({**columns, "plan_step": step}))

    def _view(self, content: Mapping[str, Any]) -> StepView:
        if self._limits is None:
            raise ValueError("a view comes before any limits; expected a line with call 'limits' first")
        return _decode_view(_object(content, "view"), self._limits)


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
    while len(steps) >= _OPEN_STEPS:
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
    if content.get("format") != _FORMAT:
        raise ConfigError(f"{path}, line 1: it is no decision log's header; expected the format {_FORMAT!r}")
    if content.get("version") != _VERSION:
        raise ConfigError(f"{path}, line 1: the version is {content.get('version')!r}; expected {_VERSION}")
    try:
        fields = _restored(_object(content, "header"))
        seed, costs = fields.get("seed") or 0, fields.get("costs")
        if not isinstance(seed, int):
            raise ValueError(f"seed is {seed!r}; expected an integer")
        decoded = None if costs is None else _decoded(_COSTS, _object(fields, "costs"))
    except KeyError as error:
        raise _malformed(path, 1, f"the field {error} is missing") from None
    except ValueError as error:
        raise _malformed(path, 1, str(error)) from None
    return Header(str(content.get("dynaspec", "unknown")), fields, seed, decoded)


def _malformed(path: Path, line: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {line}: {what}")


# --- the values of the seam as JSON and back, without loss ------------------------------------------------------------


def _columns(kind: type[Any], *, but: tuple[str, ...] = ()) -> Callable[[Any], dict[str, Any]]:
    names = tuple(field.name for field in dataclasses.fields(kind) if field.name not in but)
    values = attrgetter(*names)
    return lambda value: dict(zip(names, values(value), strict=True))


_encode_view = _columns(StepView, but=("limits",))
_encode_plan = _columns(SpecPlan)
_encode_drafts = _columns(DraftView)
_encode_outcome = _columns(StepOutcome)


def _encode_change(plan: SpecPlan, base: SpecPlan) -> dict[str, Any]:
    """The fields of ``plan`` that are not those of ``base``."""
    before = _encode_plan(base)
    return {name: value for name, value in _encode_plan(plan).items() if value != before[name]}


def _decode_view(value: Mapping[str, Any], limits: Limits) -> StepView:
    view = _decoded(_VIEW, {**value, "limits": limits})
    _check_columns(view, "ids", ("context_len", "room_depth", "room_nodes", "max_draft", "temperature"))
    return view


def _decode_plan(value: Mapping[str, Any], base: SpecPlan | None = None) -> SpecPlan:
    """A plan; with a ``base``, that plan with the fields of ``value`` changed."""
    plan = _decoded(_PLAN, value if base is None else {**_encode_plan(base), **value})
    _check_columns(plan, "depth", ("proposer", "nodes"))
    return plan


def _decode_drafts(value: Mapping[str, Any]) -> DraftView:
    drafts = _decoded(_DRAFTS, value)
    _check_columns(
        drafts, "length", ("confidence", *(name for name in ("signal", "repeat_bonus") if getattr(drafts, name)))
    )
    return drafts


def _decode_outcome(value: Mapping[str, Any]) -> StepOutcome:
    outcome = _decoded(_OUTCOME, value)
    _check_columns(outcome, "ids", (*_OUTCOME_COLUMNS, *(("signal",) if outcome.signal else ())))
    return outcome


def _decoded(adapter: TypeAdapter[_T], value: object) -> _T:
    """
    Raises:
        ValueError: a field is missing or of the wrong type; the message names it.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg'].lower()}" if where else str(first["msg"])) from None


def _check_columns(value: object, first: str, others: tuple[str, ...]) -> None:
    """
    Raises:
        ValueError: the columns differ in length.
    """
    size = len(getattr(value, first))
    for name in others:
        if len(getattr(value, name)) != size:
            raise ValueError(f"{name} has {len(getattr(value, name))} entries but {first} has {size}; expected as many")


def _dumps(value: object) -> bytes:
    """UTF-8 JSON on one line; floats keep every bit, NaN and infinities become strings.

    Raises:
        TypeError: a value that JSON has no counterpart of.
    """
    try:  # three times as fast as ``json``, whose floats are slow
        return to_json(value, inf_nan_mode="strings", fallback=_plain)
    except PydanticSerializationError:  # half a surrogate pair, which UTF-8 cannot hold
        return _ESCAPING.encode(_written_out(value)).encode("ascii")


def _restored(value: Any) -> Any:
    """A free JSON value with its NaN and infinities as floats again."""
    if isinstance(value, dict):
        return {name: _restored(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_restored(entry) for entry in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: object) -> object:
    """What the encoder does not know by itself."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a value is a {type(value).__name__}; expected one that JSON can hold")


def _written_out(value: object) -> object:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [_written_out(entry) for entry in value]
    if isinstance(value, Mapping):
        return {name: _written_out(entry) for name, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _written_out({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    return _written_out(_plain(value))
