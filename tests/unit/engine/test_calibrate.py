from __future__ import annotations

from collections.abc import Sequence

import torch

from dynaspec.engine import calibrate
from dynaspec.engine.calibrate import Runner, measure_costs
from dynaspec.kv.arena import Arena
from dynaspec.model.base import ForwardOutput
from dynaspec.model.batch import ForwardBatch
from unit.engine.fakes import FakeModel


class TimedModel(FakeModel):
    """A pass takes a second, and a tenth for every row; compiling a size for the first time takes a hundred more."""

    def __init__(self, scale: float, clock: Clock) -> None:
        super().__init__()
        self._scale, self._clock = scale, clock
        self.seen: set[int] = set()

    def forward(
        self, batch: ForwardBatch, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], taps: Sequence[int] = ()
    ) -> ForwardOutput:
        assert (batch.slots == -1).all()
        self._clock.now += self._scale * (1.0 + batch.rows / 10 + 100.0 * (batch.rows not in self.seen))
        self.seen.add(batch.rows)
        self.rows.append(batch.rows)
        return ForwardOutput(torch.zeros(batch.rows, 1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def runner(scale: float, clock: Clock) -> Runner:
    model = TimedModel(scale, clock)
    return Runner(model, Arena.allocate(1, model.kv_shapes(1), torch.float32, torch.device("cpu")))


def rounded(curve: tuple[tuple[int, float], ...], scale: float) -> list[tuple[int, float]]:
    return [(rows, round(seconds / scale, 6)) for rows, seconds in curve]


def test_curves_of_all_models_without_their_first_pass() -> None:
    clock, scale = Clock(), 1e-6
    costs = measure_costs(runner(scale, clock), (None, runner(scale / 10, clock)), clock, 1024)
    assert rounded(costs.target, scale) == [(n, round(1 + n / 10, 6)) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert costs.drafters[0] == ()
    assert rounded(costs.drafters[1], scale / 10) == [(1, 1.1), (4, 1.4), (16, 2.6)]


def test_no_larger_passes_than_the_host_runs() -> None:
    clock = Clock()
    assert [rows for rows, _ in measure_costs(runner(1e-6, clock), (), clock, 20).target] == [1, 2, 4, 8, 16]


def test_slow_models_are_measured_at_few_sizes() -> None:
    clock = Clock()
    target = runner(4e-3, clock)
    costs = measure_costs(target, (runner(1.0, clock),), clock, 64)
    assert [rows for rows, _ in costs.drafters[0]] == [1]
    assert [rows for rows, _ in costs.target] == [1]
    clock = Clock()
    costs = measure_costs(runner(4e-3, clock), (), clock, 64)
    assert [rows for rows, _ in costs.target] == [1, 2, 4]
    assert clock.now < 2 * calibrate.BUDGET_S
