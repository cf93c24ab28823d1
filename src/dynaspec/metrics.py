"""What ``LLM.get_metrics`` returns; vLLM's module is ``vllm.v1.metrics.reader``."""

from __future__ import annotations

from .observe.families import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
