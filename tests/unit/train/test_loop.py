from __future__ import annotations

import math

import pytest
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.train import loop as loop_module
from dynaspec.train.data import RowSampler
from dynaspec.train.loop import RowLoop
from dynaspec.train.model import NextToken, build
from dynaspec.train.optimizer import Budget, Optimizers, Rates, RateSchedule
from dynaspec.train.run import Checkpoints

from .conftest import TINY

CPU = torch.device("cpu")
SCHEDULE = RateSchedule(warmup_steps=2, decay_share=0.5)


def make(tokens, folder, seed=0, identity=None, loss=None):
    model = build(TINY, seed)
    optimizers = Optimizers(model, Rates())
    loop = RowLoop(
        model,
        optimizers,
        RowSampler(tokens, 16, seed=5),
        loss or NextToken(model),
        2,
        SCHEDULE,
        Checkpoints(folder),
        identity or {"seed": 5},
        CPU,
    )
    return model, optimizers, loop


def states(model, optimizers):
    flat = {**model.state_dict()}
    for name, state in optimizers.state_dict().items():
        for index, values in state["state"].items():
            flat |= {f"{name}.{index}.{key}": torch.as_tensor(value) for key, value in values.items()}
    return flat


def test_resumed_run_equals_an_uninterrupted_one(tokens, tmp_path):
    whole_model, whole_optimizers, whole = make(tokens, tmp_path / "whole")
    whole.run(Budget(max_steps=8))

    class StopError(Exception):
        pass

    def interrupt(report):
        if report.progress.step == 4:
            first.save(Checkpoints(tmp_path / "parts").latest)
        if report.progress.step == 5:
            raise StopError  # killed one step after its last save

    _, _, first = make(tokens, tmp_path / "parts")
    with pytest.raises(StopError):
        first.run(Budget(max_steps=8), interrupt)
    model, optimizers, second = make(tokens, tmp_path / "parts", seed=99)
    assert second.resume(Checkpoints(tmp_path / "parts").latest)
    assert second.progress.step == 4
    second.run(Budget(max_steps=8))

    expected, got = states(whole_model, whole_optimizers), states(model, optimizers)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    for name in ("step", "rows", "tokens", "loss"):
        assert getattr(second.progress, name) == getattr(whole.progress, name)


def test_learning_lowers_the_loss(tokens, tmp_path):
    _, _, loop = make(tokens, tmp_path)
    losses = []
    done = loop.run(Budget(max_steps=30), lambda report: losses.append(report.progress.loss))
    assert done.tokens == 30 * 2 * 16
    assert losses[-1] < losses[0] - 1.0


def test_stable_state_is_kept_before_the_decay(tokens, tmp_path):
    _, _, loop = make(tokens, tmp_path)
    loop.run(Budget(max_steps=6))
    stable = torch.load(Checkpoints(tmp_path).stable, weights_only=True)
    assert stable["progress"]["step"] == 4  # the decay takes the steps after 3 / 6
    latest = torch.load(Checkpoints(tmp_path).latest, weights_only=True)
    assert latest["progress"]["step"] == 6
    assert not list(tmp_path.glob(".*partial"))


def test_another_run_is_refused(tokens, tmp_path):
    _, _, loop = make(tokens, tmp_path)
    loop.run(Budget(max_steps=1))
    _, _, other = make(tokens, tmp_path, identity={"seed": 6})
    with pytest.raises(ConfigError, match="was trained with seed = 5, expected 6"):
        other.resume(Checkpoints(tmp_path).latest)
    assert not other.resume(tmp_path / "nothing.pt")


def test_standing_still_is_not_training(tokens, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: clock[0])
    durations = iter([1.0, 1.0, 500.0, 1.0])

    def slow(batch):
        clock[0] += next(durations)
        return NextToken(model)(batch)

    model, _, loop = make(tokens, tmp_path, loss=slow)
    assert loop.run(Budget(max_steps=4)).seconds == pytest.approx(4.0)


def test_a_broken_loss_stops_the_run(tokens, tmp_path):
    model, _, loop = make(tokens, tmp_path, loss=lambda batch: next(model.parameters()).sum() * math.nan)
    with pytest.raises(ConfigError, match="loss: got nan at step 1"):
        loop.run(Budget(max_steps=2))
    assert not Checkpoints(tmp_path).latest.exists()


def test_a_broken_gradient_stops_the_run(tokens, tmp_path):
    model, _, loop = make(tokens, tmp_path, loss=lambda batch: (next(model.parameters()) * 0.0).sum().sqrt())
    with pytest.raises(ConfigError, match="gradient: got nan at step 1, expected a finite number"):
        loop.run(Budget(max_steps=2))
    assert not Checkpoints(tmp_path).latest.exists()


def test_a_resumed_run_that_is_over_is_left_as_it_is(tokens, tmp_path):
    _, _, loop = make(tokens, tmp_path)
    loop.run(Budget(max_tokens=100))
    assert loop.progress.tokens == 128  # whole steps of 32
    path = Checkpoints(tmp_path).latest
    before = path.stat().st_mtime_ns
    _, _, again = make(tokens, tmp_path)
    assert again.resume(path)
    assert again.run(Budget(max_tokens=100)).step == 4
    assert path.stat().st_mtime_ns == before
