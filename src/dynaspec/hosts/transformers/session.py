"""What outlives a call of ``generate``: what was learnt about a model and its drafter, and statistics.

Calls that follow one another share a session, which lives as long as the models do. A controller that fails costs no
request: the host goes on as it would by itself.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Controller, DraftView, Explains, SpecPlan, StepOutcome, StepView
from dynaspec.control.keys import SuffixSettings
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.policies.lengths import Constant, LengthController
from dynaspec.control.registry import build_controller
from dynaspec.observe.decision_log import DecisionLog, header_of, logged
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.suffix import ResponseCache

from .setup import Setup

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
CLOCK = time.perf_counter
_MOST_IDLE = 16
"""Sessions kept for a model: each configuration has one, and each call at the same time."""


class FallbackController:
    """``inner`` until it raises; then ``otherwise``, for good."""

    def __init__(self, inner: Controller, otherwise: Controller) -> None:
        self._inner = inner
        self._otherwise = otherwise

    def plan(self, view: StepView) -> SpecPlan:
        return self._call("plan", lambda controller: controller.plan(view))

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._call("trim", lambda controller: controller.trim(view, plan, drafts))

    def observe(self, outcome: StepOutcome) -> None:
        self._call("observe", lambda controller: controller.observe(outcome))

    def forget(self, ids: Sequence[str]) -> None:
        self._call("forget", lambda controller: controller.forget(ids))

    def estimates(self) -> Mapping[str, Any]:
        """Those of the controller that decides."""
        return self._call("estimates", lambda one: one.estimates() if isinstance(one, Explains) else {})

    def _call(self, name: str, call: Callable[[Controller], _T]) -> _T:
        try:
            return call(self._inner)
        except Exception:  # whatever it is, it must not cost the request
            if self._inner is self._otherwise:
                raise
            logger.exception("the controller failed in %s; drafts have a constant length from now on", name)
            self._inner = self._otherwise
            return call(self._inner)


class Session:
    """A controller and its statistics. Serves one call at a time.

    ``generate`` keeps one for every pair of models and configuration by itself; give it one of your own to have a
    decision log over several calls, or to forget what was learnt::

        with Session(decision_log="decisions.jsonl") as session:
            for inputs in prompts:
                generate(model, **inputs, assistant_model=assistant, session=session)

    Args:
        decision_log: file that every decision is written to, anew.
    """

    def __init__(self, *, decision_log: str | Path | None = None) -> None:
        self.stats = SpecStats()
        """Of all its calls."""
        self._decision_log = decision_log
        self._log: DecisionLog | None = None
        self._setup: Setup | None = None
        self._controller: Controller | None = None
        self._answers: ResponseCache | None = None
        self.requests = (f"generate-{number}" for number in count())
        """Names for its texts."""
        self.steps = count()
        """Numbers of its steps."""
        self._busy = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes out the decision log; what is decided later is not logged."""
        if self._log is not None:
            self._log.close()

    @contextmanager
    def serving(self, setup: Setup) -> Iterator[None]:
        """A call takes the session.

        Raises:
            ConfigError: it serves a call at this moment, or serves calls of another kind.
        """
        if not self._busy.acquire(blocking=False):
            raise ConfigError("the session serves another call at this moment; expected one call at a time")
        try:
            if self._setup is not None and self._setup != setup:
                raise ConfigError(
                    f"the session is for {self._setup.target} with {self._setup.assistant} and policy "
                    f"{self._setup.config.policy!r}, and was given {setup.target} with {setup.assistant} and policy "
                    f"{setup.config.policy!r}; expected models and configuration of the first call"
                )
            self._setup = setup
            yield
        finally:
            self._busy.release()

    def answers(self, settings: SuffixSettings) -> ResponseCache:
        """To all its texts, for suffix decoding."""
        if self._answers is None:
            bounds = settings.max_cached_requests, settings.max_cached_tokens
            self._answers = ResponseCache(settings.max_tree_depth, *bounds)
        return self._answers

    def controller(self, setup: Setup, measure: Callable[[], PassCosts]) -> Controller:
        """Built at the first call.

        Args:
            measure: what passes cost; asked for where the policy weighs costs.

        Raises:
            ConfigError: the host cannot carry out what the configuration asks for.
        """
        if self._controller is None:
            costs = measure() if setup.config.policy == "auto" else PassCosts()
            header = header_of(setup.target, setup.config, costs=costs, host="transformers", assistant=setup.assistant)
            decides = build_controller(setup.config, setup.limits, costs=costs)
            decides, self._log = logged(decides, self._decision_log, header)
            self._controller = FallbackController(decides, _as_transformers_would(setup))
        return self._controller


def _as_transformers_would(setup: Setup) -> Controller:
    """Drafts of one length."""
    return LengthController(Constant(setup.config.num_speculative_tokens), ChainPlanner(setup.limits))


@dataclass(frozen=True, slots=True)
class _Kept:
    """A session, and what it is for."""

    assistant: Callable[[], Any]
    """None once it is gone."""
    setup: Setup
    session: Session = field(default_factory=Session)


class Sessions:
    """Idle sessions by target model. Calls at the same time get sessions of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: weakref.WeakKeyDictionary[Any, list[_Kept]] = weakref.WeakKeyDictionary()

    @contextmanager
    def lend(self, model: Any, assistant: Any, setup: Setup) -> Iterator[Session]:
        """The session for these models and this configuration that was used last, or a new one."""
        found = self._take(model, assistant, setup)
        kept = found or _Kept((lambda: None) if assistant is None else weakref.ref(assistant), setup)
        try:
            yield kept.session
        finally:
            with self._lock:
                idle = self._idle.setdefault(model, [])
                idle.append(kept)
                del idle[:-_MOST_IDLE]

    def _take(self, model: Any, assistant: Any, setup: Setup) -> _Kept | None:
        with self._lock:
            idle = self._idle.get(model, [])
            fitting = (kept for kept in reversed(idle) if kept.setup == setup and kept.assistant() is assistant)
            found = next(fitting, None)
            if found is not None:
                idle.remove(found)
            return found


SESSIONS = Sessions()
"""The one state that outlives calls: a function that is called for prompt after prompt has nowhere else to learn."""
