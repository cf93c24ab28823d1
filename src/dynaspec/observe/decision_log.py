"""Everything a controller was asked and told, as JSON lines: for replay and for people.

The first line is the header. Then one line a call, in the order in which the controller was called::

    {"call": "limits",  …}                                    before the first view, and whenever they change
    {"call": "plan",    "step": 7, "view": …, "plan": …, "estimates": …}
    {"call": "trim",    "step": 7, "drafts": …, "trimmed": …}   with "view" and "granted" where they are not the plan's
    {"call": "observe", "step": 7, "outcome": …}
    {"call": "forget",  "ids": […]}

``observe/log_reader.py`` reads it back; ``docs/explain.md`` describes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel

import dynaspec
from dynaspec.contract.controller import Controller, Explains
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView

from .codec import (
    FORMAT,
    OPEN_STEPS,
    VERSION,
    dumps,
    encode_change,
    encode_drafts,
    encode_outcome,
    encode_plan,
    encode_view,
)
from .log_reader import (
    Call,
    ForgetCall,
    Header,
    ObserveCall,
    PlanCall,
    Record,
    TrimCall,
    read_calls,
    read_header,
    read_log,
)

__all__ = [
    "Call",
    "DecisionLog",
    "ForgetCall",
    "Header",
    "LoggedController",
    "ObserveCall",
    "PlanCall",
    "Record",
    "TrimCall",
    "header_of",
    "logged",
    "read_calls",
    "read_header",
    "read_log",
]

logger = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 18


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
            self._file: BinaryIO | None = self._path.open("wb", buffering=BUFFER_BYTES)
        except OSError as error:
            raise ConfigError(f"the decision log {self._path} cannot be written: {error.strerror}") from None
        first = {"format": FORMAT, "version": VERSION, "dynaspec": dynaspec.__version__, "header": dict(header or {})}
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
            self._file.write(dumps(line()) + b"\n")
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
            logger.error("decision log %s: its end is lost: %s", self._path, error)

    def _give_up(self, error: Exception) -> None:
        logger.error("decision log %s: stopped: %s", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:  # the disk that failed just now, fails again
                logger.debug("decision log %s: its buffer is lost", self._path)


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
        if len(self._open) >= OPEN_STEPS:
            del self._open[next(iter(self._open))]
        self._open[view.step] = _Open(view, plan, view.ids)

    def _plan_line(self, view: StepView, plan: SpecPlan) -> dict[str, Any]:
        line = {"call": "plan", "step": view.step, "view": encode_view(view), "plan": encode_plan(plan)}
        estimates = self._estimates()
        return {**line, "estimates": estimates} if estimates else line

    def _trim_line(self, view: StepView, plan: SpecPlan, drafts: DraftView, trimmed: SpecPlan) -> dict[str, Any]:
        line: dict[str, Any] = {"call": "trim", "step": plan.step}
        planned = self._open.get(plan.step)
        if planned is None or (view is not planned.view and view != planned.view):
            line["view"] = encode_view(view)
        if planned is None:
            line["granted"] = encode_plan(plan)
        elif plan is not planned.plan and plan != planned.plan:
            line["granted"] = encode_change(plan, planned.plan)
        line["drafts"] = encode_drafts(drafts)
        if trimmed is not plan and trimmed != plan:
            line["trimmed"] = encode_change(trimmed, plan)
        if planned is not None:
            planned.ids, planned.drafts = view.ids, drafts
        return line

    def _outcome_line(self, outcome: StepOutcome) -> dict[str, Any]:
        columns = encode_outcome(outcome)
        step = columns.pop("plan_step")
        planned = self._open.pop(step, None)
        if planned is not None and planned.ids == outcome.ids:
            del columns["ids"]
        if planned is not None and planned.drafts is not None:
            for signal in ("confidence", "signal"):
                if getattr(planned.drafts, signal) == getattr(outcome, signal):
                    del columns[signal]
        return {"call": "observe", "step": step, "outcome": columns}
