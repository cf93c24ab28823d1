"""What tests of units have in common."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest import mock

import pytest
import typer
from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")  # tests that draw their cases wait as long as that takes: a busy machine fails none


@pytest.fixture(scope="session", autouse=True)
def _once_a_process() -> Iterator[None]:
    """What a command does once in a process of its own, and all tests together would do a thousand times: the tree of
    commands is built, and garbage is looked for in all that the suite has loaded, which takes half a second."""
    get_command = cache(typer.main.get_command)
    with mock.patch("typer.main.get_command", get_command), mock.patch("dynaspec.bench.decoders.settle"):
        yield
