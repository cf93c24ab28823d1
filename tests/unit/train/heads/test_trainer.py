"""The order of a run's examples, its micro-batches, and how it goes on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dynaspec.contract.errors import ConfigError
from dynaspec.train.heads.states import Cache, shard_path
from dynaspec.train.heads.trainer import BatchPlan, PlanPosition


def write(folder: Path, number: int, answers: list[int]) -> None:
    """A shard of conversations with prompts of two tokens; token values tell its number."""
    ends = torch.tensor([(0, 0, 0), *[(2 + a, 1 + a, a - 1) for a in answers]]).cumsum(0)
    tokens, rows, chains = ends[-1].tolist()
    tensors = {
        "tokens": torch.full((tokens,), number, dtype=torch.int32),
        "aux": torch.arange(rows * 3, dtype=torch.bfloat16).view(rows, 3),
        "last": torch.zeros(chains, 2, dtype=torch.bfloat16),
        "mass": torch.ones(chains),
        "token_ends": ends[:, 0].contiguous(),
        "row_ends": ends[:, 1].contiguous(),
        "chain_ends": ends[:, 2].contiguous(),
        "prompts": torch.full((len(answers),), 2),
        "temperatures": torch.zeros(len(answers)),
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, shard_path(folder, number))


def refs(plan: BatchPlan) -> list[tuple[int, int]]:
    return [ref for part in plan.next().micro_batches for ref in part]


def test_every_conversation_comes_once_an_epoch_and_new_shards_with_the_next(tmp_path: Path) -> None:
    write(tmp_path, 0, [6, 6, 6])
    plan = BatchPlan(Cache(tmp_path), PlanPosition(), seed=1, batch_chains=15, micro_chains=5)
    assert sorted(refs(plan)) == [(0, 0), (0, 1), (0, 2)]
    write(tmp_path, 1, [6])
    write(tmp_path, 3, [6])  # shard 2 is missing: what comes after it waits
    next_epoch = refs(plan)
    assert plan.place.epoch == 1
    next_epoch += refs(plan)[:1]
    assert sorted(next_epoch) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_plan_goes_on_from_its_place(tmp_path: Path) -> None:
    write(tmp_path, 0, [4, 9, 5, 7, 3, 8, 6])
    straight = BatchPlan(Cache(tmp_path), PlanPosition(), 1, 12, 6)
    steps = [straight.next() for _ in range(6)]
    first = BatchPlan(Cache(tmp_path), PlanPosition(), 1, 12, 6)
    for step in steps[:3]:
        assert first.next() == step
    second = BatchPlan(Cache(tmp_path), PlanPosition(**asdict(first.place)), 1, 12, 6)
    assert [second.next() for _ in range(3)] == steps[3:]


def test_micro_batches_are_of_like_size_and_hold_the_step(tmp_path: Path) -> None:
    write(tmp_path, 0, [4, 9, 5, 7, 3, 8, 6])
    step = BatchPlan(Cache(tmp_path), PlanPosition(), 1, 35, 10).next()
    assert step.chains == 35
    assert len(step.micro_batches) == 3
    assert sorted(ref for part in step.micro_batches for ref in part) == [(0, i) for i in range(7)]


def test_examples_are_read_where_they_lie(tmp_path: Path) -> None:
    write(tmp_path, 0, [4, 3])
    shard = Cache(tmp_path).shards[0]
    example = shard.example(1)
    assert (len(shard), shard.chains(0), example.chains) == (2, 3, 2)
    assert len(example.tokens) == 5
    assert example.aux[0, 0] == 15  # after the five rows of three before it


def test_nothing_to_train_on_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got none with an answer of two tokens"):
        BatchPlan(Cache(tmp_path), PlanPosition(), 1, 8, 8).next()
