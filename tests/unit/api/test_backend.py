"""Which engine is opened. vLLM's own is run by ``tests/hosts/vllm``."""

from __future__ import annotations

from typing import Any

import pytest

from dynaspec.api import LLM, backend
from dynaspec.contract.errors import ConfigError


@pytest.mark.parametrize("name", ["vlm", "", None])
def test_a_backend_that_there_is_not(name: Any) -> None:
    with pytest.raises(ConfigError, match="expected 'dynaspec' or 'vllm'"):
        LLM("m", backend=name)


def test_without_vllm_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaspec.hosts.vllm.launch.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed; expected it to be: pip install vllm"):
        LLM("m", backend="vllm")


def test_what_vllm_cannot_carry_out_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "require_vllm", lambda: None)
    monkeypatch.setattr("dynaspec.hosts.vllm.launch.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="cannot stop between draft passes"):
        LLM("m", backend="vllm", speculative_config={"model": "d", "policy": "confidence"})
    with pytest.raises(ConfigError, match="kv_cache_memory: 'much' is not a size"):
        LLM("m", backend="vllm", kv_cache_memory="much")
