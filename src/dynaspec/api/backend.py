"""The engine behind ``LLM`` and ``AsyncLLM``: dynaspec's own, in this process, or vLLM's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig, parse_bytes
from dynaspec.engine.engine import Engine
from dynaspec.engine.intake import Prompt
from dynaspec.engine.sampling_defaults import SamplingDefaults
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.engine.vllm_options import translated
from dynaspec.hosts.vllm.launch import engine_arguments, require_vllm
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.estimates import Metric


class SteppedEngine(Protocol):
    """What ``LLM`` needs of an engine. Not thread-safe; what is raised is said by ``engine.Engine``."""

    @property
    def config(self) -> EngineConfig | Mapping[str, Any]: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """How requests without sampling parameters are sampled."""
        ...

    @property
    def unfinished(self) -> bool:
        """Requests are running or waiting."""
        ...

    def add(self, request_id: str, prompt: Prompt, params: SamplingParams) -> None:
        """Queues a prompt."""
        ...

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its output so far, or None if it is not running."""
        ...

    def step(self) -> list[RequestOutput]:
        """Runs a step; the outputs that have changed, final ones only for FINAL_ONLY."""
        ...

    def stats(self) -> SpecCounts:
        """Totals since the engine was built."""
        ...

    def metrics(self) -> list[Metric]:
        """What has been counted and measured, under vLLM's names."""
        ...

    def verify_integrity(self) -> None: ...

    def close(self) -> None: ...


def open_engine(model: str, backend: str, speculative_config: Any, options: Mapping[str, Any]) -> SteppedEngine:
    """
    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    if backend == "dynaspec":
        return open_embedded(model, speculative_config, options)
    if backend != "vllm":
        raise ConfigError(f"backend is {backend!r}; expected 'dynaspec' or 'vllm'")
    require_vllm()
    arguments = engine_arguments(model, speculative_config, _in_bytes(options), os.environ)
    from .on_vllm import EngineOnVllm  # imports vLLM

    return EngineOnVllm(arguments)


def open_embedded(model: str, speculative_config: Any, options: Mapping[str, Any]) -> Engine:
    """
    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    given = options if speculative_config is None else {**options, "speculative_config": speculative_config}
    return build_engine(EngineConfig.build(os.environ, model=model, **translated(given)))


def _in_bytes(options: Mapping[str, Any]) -> dict[str, Any]:
    memory = options.get("kv_cache_memory")
    if not isinstance(memory, str):
        return dict(options)
    try:
        return {**options, "kv_cache_memory": parse_bytes(memory)}
    except ValueError as error:
        raise ConfigError(f"kv_cache_memory: {error}") from None
