"""The engine behind ``LLM`` and ``AsyncLLM``: dynaspec's own, in this process, or vLLM's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from dynaspec.contract.errors import ConfigError
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig, parse_bytes
from dynaspec.engine.engine import Engine
from dynaspec.engine.vllm_options import translated
from dynaspec.hosts.vllm.launch import engine_arguments, require_vllm

if TYPE_CHECKING:
    from .on_vllm import EngineOnVllm


SteppedEngine: TypeAlias = "Engine | EngineOnVllm"
"""What ``LLM`` decodes with."""


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
