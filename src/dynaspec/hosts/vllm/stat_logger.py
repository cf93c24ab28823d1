"""``/metrics`` of vLLM's server with dynaspec's metrics among them: a plugin of the group ``vllm.stat_logger_plugins``.

Names and meaning are those of the embedded engine's metrics (``observe.families``).
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from .gauges import Gauges
from .report import ReportFile

logger = logging.getLogger(__name__)

LABELS = ("model_name", "engine")
"""Those of vLLM's own metrics."""


class DynaspecStatLogger(AggregateStatLoggerBase):  # type: ignore[misc]  # known only where vLLM is installed
    """Metrics of all engines that one server talks to. Without dynaspec's scheduler there is none of them."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        served = vllm_config.model_config.served_model_name
        self._model = served if isinstance(served, str) else served[0]
        self._reports = {index: ReportFile.of_engine(vllm_config, index) for index in engine_indexes}
        self._gauges: Gauges | None = None
        self._taken = False
        """Another engine of this process shows such metrics."""

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        report = None if self._taken else self._reports[engine_idx].read()
        if report is None:
            return
        if self._gauges is None:
            self._gauges = self._made()
        if self._gauges is not None:
            self._gauges.show(report, (self._model, str(engine_idx)))

    def log_engine_initialized(self) -> None:
        """vLLM's own loggers say what there is to say."""

    def _made(self) -> Gauges | None:
        try:
            return Gauges(LABELS)
        except ValueError:
            self._taken = True
            logger.warning("no dynaspec metrics of this engine: another one in this process shows its own already")
            return None
