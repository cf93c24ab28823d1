"""What vLLM tells of its statistics, and what dynaspec makes of it: metrics of a server, counts of ``LLM``. Needs vLLM.

The metrics are among those of vLLM's own ``/metrics``, by a plugin of the group ``vllm.stat_logger_plugins``. Names and
meaning are those of the embedded engine's metrics (``observe.families``).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerBase

from dynaspec.observe.counts import SpecCounts

from .report import Gauges, ReportFile

logger = logging.getLogger(__name__)

LABELS = ("model_name", "engine")
"""Those of vLLM's own metrics."""


class _StatLogger(StatLoggerBase):  # type: ignore[misc]  # known only where vLLM is installed
    """vLLM's interface, of which no more is used than that a step has ended."""

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._stepped(iteration_stats, engine_idx)

    @abstractmethod
    def _stepped(self, iteration_stats: Any, engine: int) -> None:
        """A step of an engine has ended."""

    def log_engine_initialized(self) -> None:
        """vLLM's own loggers say what there is to say."""


class DynaspecStatLogger(_StatLogger, AggregateStatLoggerBase):  # type: ignore[misc]  # as above
    """Metrics of all engines that one server talks to. Without dynaspec's scheduler there is none of them."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        served = vllm_config.model_config.served_model_name
        self._model = served if isinstance(served, str) else served[0]
        self._reports = {index: ReportFile.of_engine(vllm_config, index) for index in engine_indexes}
        self._gauges: Gauges | None = None
        self._taken = False
        """Another engine of this process shows such metrics."""

    def _stepped(self, iteration_stats: Any, engine: int) -> None:
        report = None if self._taken else self._reports[engine].read()
        if report is None:
            return
        if self._gauges is None:
            self._gauges = self._made()
        if self._gauges is not None:
            self._gauges.show(report, (self._model, str(engine)))

    def _made(self) -> Gauges | None:
        try:
            return Gauges(LABELS)
        except ValueError:
            self._taken = True
            logger.warning("no dynaspec metrics of this engine: another one in this process shows its own already")
            return None


class CountingStatLogger(_StatLogger):
    """Keeps the latest of what dynaspec's scheduler reports; without it, counts tokens."""

    def __init__(self) -> None:
        self.counts = SpecCounts()
        self._reports: ReportFile | None = None

    def of_engine(self, vllm_config: Any, engine_index: int = 0) -> CountingStatLogger:
        """For vLLM, which asks for a logger by calling something with its configuration."""
        self._reports = ReportFile.of_engine(vllm_config, engine_index)
        return self

    def _stepped(self, iteration_stats: Any, engine: int) -> None:
        report = None if self._reports is None else self._reports.read()
        if report is not None:
            self.counts = report.counts
        elif iteration_stats is not None and not self.counts.steps:
            self.counts += SpecCounts(emitted=iteration_stats.num_generation_tokens)
