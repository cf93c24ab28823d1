"""vLLM's engine as ``LLM`` needs it. Needs vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dynaspec.engine.sampling_defaults import SamplingDefaults
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.hosts.vllm.llm import VllmEngine
from dynaspec.observe.estimates import Counter, Gauge, Histogram, Metric, Vector

_KINDS = {kind.__name__: kind for kind in (Counter, Gauge, Histogram, Vector)}


class EngineOnVllm(VllmEngine):
    """With dynaspec's tokenizer, for chats; vLLM has its own for prompts."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The arguments of vLLM's ``EngineArgs``."""
        return self.arguments

    @cached_property
    def tokenizer(self) -> Tokenizer:
        given = self.arguments
        own = given.get("tokenizer")
        return Tokenizer(
            own or given["model"],
            revision=given.get("tokenizer_revision") if own else given.get("revision"),
            trust_remote_code=given.get("trust_remote_code", False),
        )

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """Those that vLLM makes of its ``generation_config`` and ``override_generation_config``."""
        return SamplingDefaults(self._engine.model_config.get_diff_sampling_param())

    def metrics(self) -> list[Metric]:
        """vLLM's own; none where it keeps none."""
        if not self._engine.log_stats:
            return []
        return [_KINDS[type(one).__name__](**vars(one)) for one in self._engine.get_metrics()]
