"""What one vLLM scheduler calls: the tracker, its decision log and its reports; and vLLM's own ways after a fault."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dynaspec.contract.step import Controller, Explains
from dynaspec.control.registry import build_controller
from dynaspec.observe.decision_log import DecisionLog, logged

from .report import Report, ReportFile, shown
from .settings import Settings, told_in
from .step_tracker import (
    Row,
    Step,
    StepTracker,
    drafter_length,
    requested_max,
    rows_of,
    sampled_of,
    speculation_of,
    verified_of,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TELL_EVERY_S = 0.25
"""Between two reports, and between two writes of the decision log."""


class SchedulerAdapter:
    """Nothing here raises once it is built: a fault is logged, and from then on vLLM decides as it always does."""

    def __init__(
        self,
        settings: Settings,
        controller: Controller,
        log: DecisionLog | None,
        *,
        reports: ReportFile,
        max_model_len: int,
        drafter_len: int | None,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            reports: where the process that serves metrics finds them.
            drafter_len: longest request, after a step, up to which the drafter runs; None = it always does.
            clock: seconds.
        """
        self._settings = settings
        self._controller = controller
        self._log = log
        self._reports = reports
        self._max_model_len = max_model_len
        self._drafter_len = drafter_len
        self._clock = clock
        self._tracker = StepTracker(controller, settings.drafter, settings.limits, alike=settings.alike)
        self._steps: dict[int, Step] = {}
        """By ``SchedulerOutput``: steps whose output is awaited."""
        self._latest: Step | None = None
        self._wishes: dict[str, int | None] = {}
        """Of requests that have not ended: see ``requested_max``."""
        self._started_s = 0.0
        self._told_s = 0.0
        self._reporting = True
        self.deciding = True
        """False: a fault has handed all decisions back to vLLM."""

    @property
    def longest(self) -> int:
        """The draft length that vLLM has by itself."""
        return self._settings.host.longest

    # --- vLLM's events, in their order --------------------------------------------------------------------------

    def begin(self) -> None:
        """A step is about to be scheduled."""
        self._started_s = self._clock()

    def schedule(self, requests: Mapping[str, Any], waiting: int, output: Any) -> Step | None:
        """A step was put together (``SchedulerOutput``); what is decided about it, None = nothing."""
        return self._attempt(lambda: self._schedule(requests, waiting, output), None)

    def sampled(self, output: Any, ran: Any) -> Mapping[str, int]:
        """The target has answered (``ModelRunnerOutput``), and vLLM has not looked at it yet."""
        return self._attempt(lambda: sampled_of(output, ran), {})

    def commit(self, output: Any, sampled: Mapping[str, int], told: Mapping[int, Any], running: int) -> None:
        """vLLM has made output of it (``EngineCoreOutputs`` by client)."""
        self._attempt(lambda: self._commit(output, sampled, told), None)
        now = self._clock()
        if running and now - self._told_s < _TELL_EVERY_S:
            return
        self._told_s = now
        if self._log is not None:  # vLLM's process may end without a word
            self._log.flush()
        keeps_statistics = any(out.scheduler_stats is not None for out in told.values())
        if self._reporting and keeps_statistics:
            self._try_report(running)

    def keep(self, ids: list[str], drafts: list[list[int]]) -> list[list[int]]:
        """The drafts that the runner has made, cut to what is to be verified; lists are new where they are cut."""
        return self._attempt(lambda: self._keep(ids, drafts), drafts)

    def checked(self, requests: Mapping[str, Any], ids: list[str]) -> None:
        """Grammars have looked at these drafts."""
        self._attempt(
            lambda: self._tracker.checked({i: len(requests[i].spec_token_ids) for i in ids if i in requests}), None
        )

    def close(self) -> None:
        """Ends the decision log and the reports."""
        if self._log is not None:
            self._log.close()
        self._reports.remove()

    # --- carried out --------------------------------------------------------------------------------------------

    def _schedule(self, requests: Mapping[str, Any], waiting: int, output: Any) -> Step | None:
        for request in output.finished_req_ids:
            self._wishes.pop(request, None)
        self._tracker.forget(sorted(output.finished_req_ids), sorted(output.preempted_req_ids or ()))
        rows = rows_of(requests, output, self._max_model_len, self._wish)
        if not rows:
            self._latest = None
            return None
        step = self._tracker.schedule(rows, waiting, self._started_s, drafts=self._drafter_runs(rows))
        self._steps[id(output)] = self._latest = step
        return step

    def _wish(self, request: Any) -> int | None:
        if request.request_id not in self._wishes:
            params = request.sampling_params
            self._wishes[request.request_id] = None if params is None else requested_max(params.extra_args)
        return self._wishes[request.request_id]

    def _drafter_runs(self, rows: list[Row]) -> bool:
        return self._drafter_len is None or max(row.computed + row.rows for row in rows) <= self._drafter_len

    def _commit(self, output: Any, sampled: Mapping[str, int], told: Mapping[int, Any]) -> None:
        step = self._steps.pop(id(output), None)
        if step is not None:
            self._tracker.commit(step, verified_of(output, sampled, told), self._clock())

    def _keep(self, ids: list[str], drafts: list[list[int]]) -> list[list[int]]:
        if self._latest is None:
            return drafts
        lengths = dict(zip(ids, map(len, drafts), strict=True))
        depths = self._tracker.drafted(self._latest, lengths, self._clock())
        return [tokens[: depths.get(request, 0)] for request, tokens in zip(ids, drafts, strict=True)]

    def _try_report(self, running: int) -> None:
        try:
            self._reports.write(self._report(running))
        except Exception:  # numbers must not cost a request either
            self._reporting = False
            logger.exception("dynaspec's metrics have failed; from now on there are none")

    def _report(self, running: int) -> Report:
        estimates = self._controller.estimates() if isinstance(self._controller, Explains) and self.deciding else {}
        return Report(
            policy=self._settings.policy,
            longest=self.longest,
            k=self._tracker.k if self.deciding else self.longest,
            deciding=self.deciding,
            running=running,
            goodput=self._tracker.stats.steps.snapshot().recent_goodput,
            estimates=shown(estimates),
            counts=self._tracker.stats.snapshot(),
        )

    def _attempt(self, act: Callable[[], T], otherwise: T) -> T:
        if not self.deciding:
            return otherwise
        try:
            return act()
        except Exception:  # whatever it is, it must not cost a request
            self.deciding = False
            logger.exception("dynaspec has failed; from now on vLLM drafts %d tokens in every step", self.longest)
            if self._log is not None:
                self._log.close()
            return otherwise


def build_adapter(vllm_config: Any, clock: Callable[[], float]) -> SchedulerAdapter:
    """
    Raises:
        ConfigError: settings that are wrong, or that vLLM cannot carry out.
    """
    settings = Settings.read(told_in(vllm_config.additional_config), speculation_of(vllm_config), os.environ)
    controller = build_controller(settings.config, settings.limits)
    controller, log = logged(controller, settings.decision_log, settings.header)
    if settings.fixed is not None:
        logger.warning("every step drafts %d tokens: %s", settings.host.longest, settings.fixed)
    return SchedulerAdapter(
        settings,
        controller,
        log,
        reports=ReportFile.of_engine(vllm_config, vllm_config.parallel_config.data_parallel_rank),
        max_model_len=vllm_config.model_config.max_model_len,
        drafter_len=drafter_length(vllm_config),
        clock=clock,
    )
