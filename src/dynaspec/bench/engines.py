"""Engines for measurements, which step them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynaspec.contract.proposer import Proposer
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine

from .policies import PolicySpec

Wrap = Callable[[Proposer], Proposer]


def open_engine(model: str, spec: PolicySpec, *, wrap: Wrap | None = None, **options: Any) -> Engine:
    """An engine under a policy.

    Args:
        wrap: puts something around the proposer that the policy's configuration asks for.
        options: fields of ``EngineConfig``.

    Raises:
        ConfigError, CheckpointError, CapacityError: see ``build_engine``.
    """
    config = EngineConfig.build(model=model, speculative_config=spec.config, **options)
    return build_engine(config, wrap=wrap)
