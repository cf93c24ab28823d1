"""Models of every kind, made once."""

from __future__ import annotations

import itertools

import pytest
from transformers.utils import logging

from unit.hosts.transformers.pairs import Models, llama, t5, whisper


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    """Transformers warns of what it does itself when it assists."""
    logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at it is a millisecond after the one before: what is decided is the same on every machine."""
    looks = itertools.count()
    monkeypatch.setattr("dynaspec.hosts.transformers.call.CLOCK", lambda: 1e-3 * next(looks))


@pytest.fixture(scope="session")
def decoder() -> Models:
    return llama()


@pytest.fixture(scope="session")
def looping() -> Models:
    """Its text repeats itself."""
    return t5()


@pytest.fixture(scope="session", params=[llama, t5, whisper], ids=["llama", "t5", "whisper"])
def models(request: pytest.FixtureRequest) -> Models:
    made: Models = request.param()
    return made
