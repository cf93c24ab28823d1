"""What is learnt about a model and its drafter, over the calls of ``generate`` that share it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from dynaspec.contract.controller import Controller
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.control.keys import SuffixSettings
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.policies.lengths import Constant, LengthController
from dynaspec.control.registry import build_controller
from dynaspec.observe.decision_log import DecisionLog, LoggedController
from dynaspec.observe.stats import SpecStats
from dynaspec.propose.response_cache import ResponseCache

from .fallback import FallbackController
from .setup import Setup

logger = logging.getLogger(__name__)

CLOCK = time.perf_counter


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
        self._requests = self._steps = 0
        self._busy = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Writes out the decision log; what is decided later is not logged."""
        if self._log is not None:
            self._log.close()

    def begin(self, setup: Setup) -> None:
        """A call takes the session.

        Raises:
            ConfigError: it serves a call at this moment, or serves calls of another kind.
        """
        if not self._busy.acquire(blocking=False):
            raise ConfigError("the session serves another call at this moment; expected one call at a time")
        if self._setup is not None and self._setup != setup:
            self._busy.release()
            raise ConfigError(
                f"the session is for {self._setup.target} with {self._setup.assistant} and policy "
                f"{self._setup.config.policy!r}, and was given {setup.target} with {setup.assistant} and policy "
                f"{setup.config.policy!r}; expected models and configuration of the first call"
            )
        self._setup = setup

    def end(self) -> None:
        """The call is over."""
        self._busy.release()

    def next_request(self) -> str:
        """A name for a text."""
        self._requests += 1
        return f"generate-{self._requests - 1}"

    def next_step(self) -> int:
        """Ascending from 0."""
        self._steps += 1
        return self._steps - 1

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
            decides = build_controller(setup.config, setup.limits, costs=costs)
            if self._decision_log is not None:
                self._log = DecisionLog(self._decision_log, _header(setup, costs))
                decides = LoggedController(decides, self._log)
            self._controller = FallbackController(decides, _as_transformers_would(setup))
        return self._controller


def _as_transformers_would(setup: Setup) -> Controller:
    """Drafts of one length."""
    return LengthController(Constant(setup.config.num_speculative_tokens), ChainPlanner(setup.limits))


def _header(setup: Setup, costs: PassCosts) -> dict[str, object]:
    return {
        "host": "transformers",
        "model": setup.target,
        "assistant": setup.assistant,
        "speculative_config": setup.config.model_dump(mode="json", exclude_none=True),
        "seed": 0,
        "costs": asdict(costs),
    }
