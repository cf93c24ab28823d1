"""Engines for measurements, which step them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynaspec.contract.proposer import Proposer
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine
from dynaspec.model.base import Model
from dynaspec.model.loader import load_model
from dynaspec.runtime import settle

from .policies import PolicySpec

Wrap = Callable[[Proposer], Proposer]


class SharedModels:
    """Loads each checkpoint once: engines that are held against each other run on the same weights in the same memory,
    since where a copy happens to lie makes a pass a few per cent faster or slower."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Any, ...], Model] = {}

    def __call__(self, path_or_id: str, **options: Any) -> Model:
        """See ``load_model``."""
        key = (path_or_id, *sorted(options.items()))
        if key not in self._loaded:
            self._loaded[key] = load_model(path_or_id, **options)
        return self._loaded[key]


def open_engine(
    model: str,
    spec: PolicySpec,
    *,
    wrap: Wrap | None = None,
    load: Callable[..., Model] = load_model,
    **options: Any,
) -> Engine:
    """An engine under a policy, in a process that does nothing else.

    Args:
        wrap: puts something around the proposer that the policy's configuration asks for.
        load: ``SharedModels`` where engines are compared.
        options: fields of ``EngineConfig``.

    Raises:
        ConfigError, CheckpointError, CapacityError: see ``build_engine``.
    """
    config = EngineConfig.build(model=model, speculative_config=spec.config, **options)
    engine = build_engine(config, wrap=wrap, load=load)
    settle()
    return engine
