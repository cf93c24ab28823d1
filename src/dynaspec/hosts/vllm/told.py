"""dynaspec's part of vLLM's ``additional_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaspec.contract.errors import ConfigError

KEY = "dynaspec"
"""Of ``additional_config``, and of a request's ``extra_args``."""
LOG_KEY = "decision_log"


def told_in(additional_config: Any) -> Any:
    """What is said to dynaspec; None = nothing."""
    return additional_config.get(KEY) if isinstance(additional_config, Mapping) else None


def as_keys(told: Any) -> dict[str, Any]:
    """The same by keys with underscores.

    Raises:
        ConfigError: it is no mapping.
    """
    if told is None:
        return {}
    if not isinstance(told, Mapping):
        raise ConfigError(f"additional_config has {KEY} = {told!r}; expected a mapping")
    return {str(key).lstrip("-").replace("-", "_"): value for key, value in told.items()}


def take_log_path(told: dict[str, Any]) -> str | None:
    """The decision log's path, which is taken out.

    Raises:
        ConfigError: it is none.
    """
    value = told.pop(LOG_KEY, None)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{LOG_KEY} is {value!r}; expected the path of a file")
    return value
