"""``LLM`` and ``AsyncLLM`` over an engine of fake models."""

from __future__ import annotations

import pytest

from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine
from unit.api.built import Built
from unit.engine.engines import make


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    seen = Built()

    def build(config: EngineConfig) -> Engine:
        seen.config = config
        seen.engine, seen.rig = make(overlapped=config.async_scheduling)
        return seen.engine

    monkeypatch.setattr("dynaspec.api.llm.build_engine", build)
    return seen
