"""Rows that are in a pass for their KV only: what the others give, and what is left behind, are the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.cpu_decoder import CpuDecoder
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.model.taps import Taps
from support.checkpoints import FAMILIES, VOCAB, random_model, save
from unit.model import tiny

COUNTS = (300, 40, 5, 33)
KV_ONLY = np.array([299, 40, 0, 30], np.int32)
"""All rows but the last, all, none, all but three."""
BLOCKS = [-(-count // BLOCK_SIZE) for count in COUNTS]


def texts(vocabulary: int, context: int = 0) -> ForwardBatch:
    """A pass over whole texts, of each of which so many tokens have been before."""
    first = np.cumsum([0, *BLOCKS])
    tables = np.zeros((len(COUNTS), max(BLOCKS)), np.int32)
    for i, blocks in enumerate(BLOCKS):
        tables[i, :blocks] = np.arange(first[i], first[i + 1])
    positions = np.concatenate([np.arange(context, count) for count in COUNTS])
    owner = np.repeat(np.arange(len(COUNTS)), np.array(COUNTS) - context)
    return ForwardBatch(
        tokens=torch.from_numpy(np.random.default_rng(2).integers(3, vocabulary, positions.size)),
        positions=positions,
        slots=tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start=np.cumsum([0, *(count - context for count in COUNTS)]).astype(np.int32),
        context_lens=np.full(len(COUNTS), context, np.int32),
        block_tables=tables,
    )


def run(model: Model, batch: ForwardBatch, states: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What comes out of a pass, and what it leaves in the caches and of the states."""
    layers, cpu = model.config.num_layers, torch.device("cpu")
    kv = Arena.allocate(layers, model.kv_shapes(sum(BLOCKS)), torch.float32, cpu).layers
    taps = Taps.allocate(states, sum(BLOCKS), layers, model.config.hidden_size, torch.float32, cpu)
    hidden = model.forward(batch, kv, taps if states else None)
    return hidden, [taps.arena, *(cache for pair in kv for cache in pair)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_that_are_read_and_all_kv_are_the_same(family: str, tmp_path: Path) -> None:
    name, options = FAMILIES[family]
    places = {"n_positions", "max_position_embeddings"} & options.keys()
    save(random_model(name, options | dict.fromkeys(places, max(COUNTS)), seed=3), tmp_path)
    model = load_model(str(tmp_path))
    assert isinstance(model, CpuDecoder)
    batch = texts(VOCAB)
    whole, left = run(model, batch, ())
    read, left_too = run(model, replace(batch, kv_only=KV_ONLY), ())
    start = batch.query_start
    assert torch.equal(read, whole[[start[1] - 1, *range(start[2], start[3]), *range(start[4] - 3, start[4])]])
    assert all(map(torch.equal, left, left_too))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    config = {"max_position_embeddings": max(COUNTS)}
    return load_model(str(tiny.write(tmp_path_factory.mktemp("tiny"), config)))


@pytest.mark.parametrize("states", [(0, 1), (1, 2), (3,)], ids=["inner", "before the last norm", "final"])
def test_states_are_kept_of_every_row(states: tuple[int, ...], small: Model) -> None:
    batch = texts(50)
    whole, left = run(small, batch, states)
    read, left_too = run(small, replace(batch, kv_only=KV_ONLY), states)
    assert torch.equal(read, replace(batch, kv_only=KV_ONLY).read(whole))
    assert all(map(torch.equal, left, left_too))


def test_nothing_may_be_left_to_read(small: Model) -> None:
    batch = texts(50)
    _, left = run(small, batch, ())
    read, left_too = run(small, replace(batch, kv_only=np.array(COUNTS, np.int32)), ())
    assert read.shape == (0, small.config.hidden_size)
    assert all(map(torch.equal, left, left_too))
