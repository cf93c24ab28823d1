from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from dynaspec.cli import spawnable
from dynaspec.contract.errors import ConfigError


@pytest.fixture
def started(monkeypatch):
    """What would have taken the process's place."""
    calls = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: calls.append(arguments))
    monkeypatch.setattr("dynaspec.hosts.vllm.launch.find_spec", lambda name: object())
    monkeypatch.setattr(sys, "argv", ["dynaspec", "profile", "--backend", "vllm"])
    return calls


def test_the_command_is_started_again(started):
    spawnable.become_spawnable()
    assert started == [[sys.executable, "-m", "dynaspec.cli.spawnable", "profile", "--backend", "vllm"]]


def test_once_is_enough(started, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spawnable.__spec__))
    spawnable.become_spawnable()
    assert started == []


def test_without_vllm(started, monkeypatch):
    monkeypatch.setattr("dynaspec.hosts.vllm.launch.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        spawnable.become_spawnable()
