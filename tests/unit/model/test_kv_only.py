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


def texts(vocabulary: int, first: int = 0, end: int = max(COUNTS)) -> ForwardBatch:
    """A pass over tokens ``first`` … ``end`` − 1 of the texts, as far as they go."""
    stops = np.minimum(COUNTS, end)
    begins = np.cumsum([0, *BLOCKS])
    tables = np.zeros((len(COUNTS), max(BLOCKS)), np.int32)
    for i, blocks in enumerate(BLOCKS):
        tables[i, :blocks] = np.arange(begins[i], begins[i + 1])
    positions = np.concatenate([np.arange(first, stop) for stop in stops])
    owner = np.repeat(np.arange(len(COUNTS)), stops - first)
    whole = np.random.default_rng(2).integers(3, vocabulary, (len(COUNTS), max(COUNTS)))
    return ForwardBatch(
        tokens=torch.from_numpy(whole[owner, positions]),
        positions=positions,
        slots=tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start=np.cumsum([0, *(stops - first)]).astype(np.int32),
        context_lens=np.full(len(COUNTS), first, np.int32),
        block_tables=tables,
    )


def run(
    model: Model, *batches: ForwardBatch, states: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What comes out of the last of some passes, and what they leave in the caches and of the states."""
    layers, cpu = model.config.num_layers, torch.device("cpu")
    kv = Arena.allocate(layers, model.kv_shapes(sum(BLOCKS)), dtype, cpu).layers
    taps = Taps.allocate(states, sum(BLOCKS), layers, model.config.hidden_size, torch.float32, cpu)
    for batch in batches:
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
    whole, left = run(model, batch)
    read, left_too = run(model, replace(batch, kv_only=KV_ONLY))
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
    whole, left = run(small, batch, states=states)
    read, left_too = run(small, replace(batch, kv_only=KV_ONLY), states=states)
    assert torch.equal(read, replace(batch, kv_only=KV_ONLY).without_kv_only(whole))
    assert all(map(torch.equal, left, left_too))


def test_nothing_may_be_left_to_read(small: Model) -> None:
    batch = texts(50)
    _, left = run(small, batch)
    read, left_too = run(small, replace(batch, kv_only=np.array(COUNTS, np.int32)))
    assert read.shape == (0, small.config.hidden_size)
    assert all(map(torch.equal, left, left_too))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_a_tree_and_behind_a_part_that_was_read_before(dtype: torch.dtype, small: Model) -> None:
    """The second of two passes; in the third text, of which one token was read, two follow it and two the first."""
    before, rest = texts(50, 0, 1), texts(50, 1)
    tree = np.full(rest.rows, -1, np.int64)
    tree[rest.query_start[2] : rest.query_start[3]] = [0b1, 0b11, 0b101, 0b1101]
    rest.ancestors = tree
    rest.positions = rest.positions.copy()
    rest.positions[rest.query_start[2] : rest.query_start[3]] = [1, 2, 2, 3]
    some = replace(rest, kv_only=np.array([298, 39, 0, 29], np.int32))
    whole, left = run(small, before, rest, dtype=dtype)
    read, left_too = run(small, before, some, dtype=dtype)
    assert torch.equal(read, some.without_kv_only(whole))
    assert all(map(torch.equal, left, left_too))


def test_which_rows_are_there_for_their_kv_only() -> None:
    batch = replace(texts(50), kv_only=KV_ONLY)
    rows = batch.without_kv_only(torch.arange(batch.rows))
    start = batch.query_start
    assert rows.tolist() == [start[1] - 1, *range(start[2], start[3]), *range(start[4] - 3, start[4])]
