"""A tiny pair of models, and the console entry called as a shell would call it."""

from __future__ import annotations

import sys

import pytest
import torch

from dynaspec.cli.main import main
from support.checkpoints import Pair, save_pair
from support.commands import Result


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def dynaspec(monkeypatch, capsys):
    """Runs ``dynaspec`` with arguments; what it printed, and its exit code."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["dynaspec", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def no_demo_model(monkeypatch):
    """The package that brings the demonstration's model is not installed."""
    monkeypatch.setattr("dynaspec.cli.demo.find_spec", lambda name: None)


@pytest.fixture
def demo_model(monkeypatch, pair):
    """The tiny pair in the place of the demonstration's models."""
    monkeypatch.setattr("dynaspec.cli.demo.demo_target", lambda: pair.target)
    monkeypatch.setattr("dynaspec.cli.demo.demo_head", lambda: pair.drafter)
    return pair
