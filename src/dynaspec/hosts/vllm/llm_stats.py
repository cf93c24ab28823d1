"""Counts of a vLLM engine that runs in scripts. Needs vLLM."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from dynaspec.observe.counts import SpecCounts

from .report import take


class CountingStatLogger(StatLoggerBase):  # type: ignore[misc]  # not known where vLLM is not installed
    """Keeps the latest of what dynaspec's scheduler reports; without it, counts tokens."""

    def __init__(self) -> None:
        self.counts = SpecCounts()

    def of_engine(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """For vLLM, which asks for a logger by calling something with its configuration."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        report = None if scheduler_stats is None else take(scheduler_stats)
        if report is not None:
            self.counts = report.counts
        elif iteration_stats is not None and not self.counts.steps:
            self.counts += SpecCounts(emitted=iteration_stats.num_generation_tokens)

    def log_engine_initialized(self) -> None:
        """vLLM's own loggers say what there is to say."""
