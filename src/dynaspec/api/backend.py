"""The engine behind ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from dynaspec.contract.errors import ConfigError
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine

Backend = Literal["dynaspec"]


def open_engine(model: str, backend: str, speculative_config: Any, options: Mapping[str, Any]) -> Engine:
    """
    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    if backend != "dynaspec":
        raise ConfigError(f"backend is {backend!r}; expected 'dynaspec', the only one in this version")
    return build_engine(EngineConfig.build(os.environ, model=model, speculative_config=speculative_config, **options))
