"""Passes of many rows, of which the compiled decoder does parts at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.cpu_decoder import CpuDecoder
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from support.checkpoints import FAMILIES, VOCAB, random_model, save
from support.head_passes import rows

LONGEST = 400


def hidden_of(model: Model, text: list[int], at_once: int) -> torch.Tensor:
    """[tokens, hidden] of passes over so many tokens each."""
    blocks = -(-len(text) // BLOCK_SIZE)
    kv = Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), torch.float32, torch.device("cpu")).layers
    starts = range(0, len(text), at_once)
    return torch.cat([model.forward(rows(text[start : start + at_once], start, blocks), kv) for start in starts])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_however_many_are_computed_with_it(family: str, tmp_path: Path) -> None:
    name, options = FAMILIES[family]
    places = {"n_positions", "max_position_embeddings"} & options.keys()
    save(random_model(name, options | dict.fromkeys(places, LONGEST), seed=3), tmp_path)
    model = load_model(str(tmp_path))
    assert isinstance(model, CpuDecoder)
    text = np.random.default_rng(5).integers(0, VOCAB, LONGEST).tolist()
    whole = hidden_of(model, text, LONGEST)
    for at_once in (150, 97, 40):
        assert torch.equal(hidden_of(model, text, at_once), whole)
