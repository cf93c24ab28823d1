from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.taps import Taps
from dynaspec.propose import pass_timing
from dynaspec.propose.pass_timing import Runner, measure_costs
from unit.engine.fakes import FakeModel

SEEN, READ = 0.001, 0.002


class TimedModel(FakeModel):
    """A pass takes a second, a tenth for every row, ``SEEN`` for each KV entry that a row sees, ``READ`` for each of a
    request, and ``cold`` more after another model's; compiling a size for the first time takes a hundred more."""

    def __init__(self, scale: float, clock: Clock, cold: float = 0.0) -> None:
        super().__init__()
        self._scale, self._clock, self._cold = scale, clock, cold
        self.slow_from = math.inf
        """Seconds on the clock from which on everything takes twice as long."""
        self.seen: set[tuple[int, int, int]] = set()
        self.batches: list[ForwardBatch] = []

    def forward(
        self, batch: ForwardBatch, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], taps: Taps | None = None
    ) -> torch.Tensor:
        assert (batch.slots == -1).all()
        rows_each = np.diff(batch.query_start)
        size = batch.rows, int((rows_each * batch.context_lens).sum()), int(batch.context_lens.sum())
        seconds = 1.0 + size[0] / 10 + SEEN * size[1] + READ * size[2] + 100.0 * (size not in self.seen)
        scale = self._scale * (1.0 + (self._clock.now > self.slow_from))
        self._clock.now += scale * (seconds + self._cold * (self._clock.latest is not self))
        self._clock.latest = self
        self.seen.add(size)
        self.rows.append(batch.rows)
        self.batches.append(batch)
        return torch.zeros(batch.rows, 1)


class Clock:
    now = 0.0
    latest: TimedModel | None = None
    """Which model ran last."""

    def __call__(self) -> float:
        return self.now


def runner(scale: float, clock: Clock, *, blocks: int = 40, cold: float = 0.0) -> Runner:
    model = TimedModel(scale, clock, cold)
    return Runner(model, Arena.allocate(1, model.kv_shapes(blocks), torch.float32, torch.device("cpu")))


def rounded(curve: tuple[tuple[int, float], ...], scale: float, around_s: float) -> list[tuple[int, float]]:
    """Without what the host does around a pass."""
    return [(rows, round((seconds - around_s) / scale, 6)) for rows, seconds in curve]


def test_curves_of_all_models_without_their_first_pass() -> None:
    clock, scale = Clock(), 1e-6
    costs = measure_costs(runner(scale, clock), (None, runner(scale / 10, clock)), clock, 1024)
    assert rounded(costs.target, scale, pass_timing.AROUND_PASS_S) == [
        (n, round(1 + n / 10, 6)) for n in pass_timing.TARGET_ROWS
    ]
    assert costs.drafters[0] == ()
    # A tenth a row, and what the KV takes that a drafter's rows see as they draft.
    seen = pass_timing.CONTEXT * (SEEN + READ)
    assert rounded(costs.drafters[1], scale / 10, pass_timing.AROUND_DRAFT_PASS_S) == [
        (n, round(1 + n / 10 + n * seen, 6)) for n in pass_timing.DRAFTER_ROWS
    ]


def test_no_larger_passes_than_the_host_runs() -> None:
    clock = Clock()
    assert [rows for rows, _ in measure_costs(runner(1e-6, clock), (), clock, 20).target] == [1, 4, 8, 14, 16]


def test_slow_models_are_measured_at_few_sizes() -> None:
    clock = Clock()
    target = runner(4e-3, clock)
    costs = measure_costs(target, (runner(1.0, clock),), clock, 64)
    assert [rows for rows, _ in costs.drafters[0]] == [1]
    assert [rows for rows, _ in costs.target] == [1]
    clock = Clock()
    costs = measure_costs(runner(4e-3, clock), (), clock, 64)
    assert [rows for rows, _ in costs.target] == [1, 4, 8]
    assert clock.now < 2 * pass_timing.BUDGET_S


def test_the_first_pass_of_a_draft_is_measured_after_the_targets() -> None:
    clock, scale = Clock(), 1e-6
    drafters = (runner(scale, clock, cold=0.7), None, runner(scale, clock))
    costs = measure_costs(runner(scale, clock), drafters, clock, 64)
    around = pass_timing.AROUND_DRAFT_S
    assert [round((first - around) / scale, 6) for first in (costs.first_s[0], costs.first_s[2])] == [0.7, 0.0]
    assert costs.first_s[1] == 0.0
    assert rounded(costs.drafters[0], scale, pass_timing.AROUND_DRAFT_PASS_S) == [
        (n, round(1 + n * (0.1 + pass_timing.CONTEXT * (SEEN + READ)), 6)) for n in pass_timing.DRAFTER_ROWS
    ]  # of the passes after it


def test_passes_of_a_drafter_are_timed_as_they_follow_each_other() -> None:
    class Compiled(TimedModel):
        """Passes run from Python take half a second more each."""

        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            self._clock.now += 0.5 * self._scale
            return super().forward(*args, **options)

        def repeat(self, batch: ForwardBatch, kv: Any, passes: int) -> None:
            for _ in range(passes):
                super().forward(batch, kv)

    clock, scale = Clock(), 1e-6
    model = Compiled(scale, clock)
    drafter = Runner(model, Arena.allocate(1, model.kv_shapes(40), torch.float32, torch.device("cpu")))
    costs = measure_costs(runner(scale, clock), (drafter,), clock, 64)
    (rows, seconds), *_ = rounded(costs.drafters[0], scale, pass_timing.AROUND_DRAFT_PASS_S)
    one = 1 + rows * (0.1 + pass_timing.CONTEXT * (SEEN + READ))
    assert one < seconds < one + 0.15  # one of four was run from Python
    assert (costs.first_s[0] - pass_timing.AROUND_DRAFT_S) / scale == pytest.approx(0.375)


def test_a_first_pass_that_is_faster_brings_nothing() -> None:
    clock, scale = Clock(), 1e-6
    costs = measure_costs(runner(scale, clock), (runner(scale, clock, cold=-0.5),), clock, 64)
    assert costs.first_s == (pass_timing.AROUND_DRAFT_S,)


def test_what_a_row_takes_for_what_it_sees_and_a_request_for_what_is_read() -> None:
    clock, scale = Clock(), 1e-6
    costs = measure_costs(runner(scale, clock), (), clock, 64)
    assert (round(costs.context_s / scale, 9), round(costs.read_s / scale, 9)) == (SEEN, READ)


def test_rows_that_share_what_they_see_are_no_dearer_than_others() -> None:
    """Whatever noise says of it: no price falls below nothing, and both together are what was measured."""

    def trials(*seconds: float) -> list[pass_timing._Pass]:
        return [pass_timing._Pass(runner(1.0, Clock()), 16, seconds=one) for one in seconds]

    entries = pass_timing.CONTEXT_ROWS * pass_timing.CONTEXT
    for alone, shared in ((3.0, 4.0), (3.0, 2.5), (3.0, 0.5), (0.5, 3.0), (0.5, 0.5)):
        (blind,) = trials(1.0)
        found = pass_timing._context_s(blind, trials(alone, shared))
        assert min(found) >= 0.0
        assert sum(found) == pytest.approx(max(0.0, alone - 1.0) / entries)
    (blind,) = trials(1.0)
    assert pass_timing._context_s(blind, trials(3.0)) == (0.0, pytest.approx(2.0 / entries))


def test_context_is_not_measured_where_there_is_nothing_to_compare_it_with() -> None:
    clock = Clock()
    assert measure_costs(runner(1e-6, clock), (), clock, 8).context_s == 0.0
    slow = runner(4e-3, clock)
    assert measure_costs(slow, (), clock, 64).context_s == 0.0  # no time left
    assert {context for _, context, _ in slow.model.seen} == {0}  # type: ignore[attr-defined]


def test_what_passes_see_lies_in_the_arena() -> None:
    """Rows may share blocks: whatever is in them. None is seen that is not there."""
    for blocks, context, seen in ((40, 0, 0), (40, 256, 256), (40, 100, 100), (4, 256, 48), (1, 256, 0)):
        one = runner(1e-6, Clock(), blocks=blocks)
        one.run(5, context)
        (batch,) = one.model.batches  # type: ignore[attr-defined]
        assert batch.context_lens.tolist() == batch.positions.tolist() == [seen] * 5
        assert batch.block_tables.shape[1] * BLOCK_SIZE > seen
        assert 0 <= batch.block_tables.min() <= batch.block_tables.max() < blocks
        used = batch.block_tables[:, : -(-seen // BLOCK_SIZE)]
        assert all(len(set(row)) == len(row) for row in used.tolist())
        one.run(8, context, rows_each=4)
        batch = one.model.batches[-1]  # type: ignore[attr-defined]
        assert batch.context_lens.tolist() == [seen] * 2
        assert batch.query_start.tolist() == [0, 4, 8]
        assert batch.block_tables.shape[1] * BLOCK_SIZE >= seen + 4


def test_trials_that_were_disturbed_alone_count_little() -> None:
    clock, scale = Clock(), 1e-6
    noise = iter([0.0, 3.0, 1.0] * 200)

    def disturbed() -> float:
        clock.now += scale * next(noise)
        return clock.now

    quiet = measure_costs(runner(scale, Clock()), (), Clock(), 8)
    found = measure_costs(runner(scale, clock), (), disturbed, 8)
    assert len(found.target) == len(quiet.target) == 3
    for (_, seconds), (_, least) in zip(found.target, ((1, 1.1), (4, 1.4), (8, 1.8)), strict=True):
        assert (seconds - pass_timing.AROUND_PASS_S) / scale <= least + 1.0 + 1e-6


def test_a_slow_moment_of_the_machine_slows_no_size_alone() -> None:
    clock, scale = Clock(), 1e-6
    quiet = measure_costs(runner(scale, clock), (), clock, 64)
    for share_of_the_end in (0.02, 0.05, 0.1):
        slowed = Clock()
        target = runner(scale, slowed)
        target.model.slow_from = (1.0 - share_of_the_end) * clock.now  # type: ignore[attr-defined]
        found = measure_costs(target, (), slowed, 64)
        assert dict(found.target) == pytest.approx(dict(quiet.target), rel=1e-9)
        assert (found.context_s, found.read_s) == pytest.approx((quiet.context_s, quiet.read_s))
        assert slowed.now > clock.now


def test_a_size_that_was_disturbed_whenever_the_machine_was_fast_is_not_dear() -> None:
    """Its fastest trial would say so: each is held against the others of its round."""
    pace = np.array([1.0, 2.0, 1.0, 2.0, 2.0])
    disturbed = pace * [1.5, 1.0, 1.4, 1.0, 1.0]
    quiet = Clock()
    passes = [
        pass_timing._Pass(runner(1.0, quiet), rows, trials=(rows * trials).tolist())
        for rows, trials in ((1, disturbed), (4, pace), (8, pace), (16, pace))
    ]
    slowness = pass_timing._slowness(passes)
    for one in passes:
        one.settle(slowness)
    assert [one.seconds / passes[0].seconds for one in passes] == pytest.approx([1.0, 4.0, 8.0, 16.0])


def test_a_drafter_is_timed_without_a_target() -> None:
    """Which somebody else runs."""
    clock, scale = Clock(), 1e-6
    costs = measure_costs(None, (runner(scale, clock), None), clock, 64)
    assert (costs.target, costs.context_s, costs.read_s) == ((), 0.0, 0.0)
    assert [rows for rows, _ in costs.drafters[0]] == list(pass_timing.DRAFTER_ROWS)
    assert costs.first_s == (pass_timing.AROUND_DRAFT_S, 0.0)
    assert measure_costs(None, (None,), clock, 64).drafters == ((),)
