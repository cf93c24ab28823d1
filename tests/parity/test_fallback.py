"""Architectures without a family file, against Transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.loader import load_model

from .checkpoints import LLAMA_SIZES, TEXTS, save_random, their_logits
from .paging import PagedTexts, all_states, in_passes

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

NO_HEAD_DIM = {key: value for key, value in LLAMA_SIZES.items() if key != "head_dim"}
DRIVABLE: dict[str, dict[str, Any]] = {
    "StableLmConfig": NO_HEAD_DIM | {"hidden_size": 64, "use_qkv_bias": True},
    "Olmo2Config": NO_HEAD_DIM,
    "CohereConfig": NO_HEAD_DIM | {"logit_scale": 0.3},
    "OPTConfig": {
        "vocab_size": 307,
        "hidden_size": 48,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "ffn_dim": 72,
        "max_position_embeddings": 96,
        "init_std": 0.1,
    },
}


@pytest.mark.parametrize("name", DRIVABLE)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = save_random(name, DRIVABLE[name], tmp_path)
    with caplog.at_level(logging.WARNING):
        ours = load_model(str(tmp_path))
    assert "Transformers' own modelling code" in caplog.text
    found = in_passes(ours, TEXTS, [(20, 0, 5), (17, 18, 0), (1, 0, 0), (5, 0, 0)])
    for logits, expected in zip(found, their_logits(theirs), strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_taps_are_the_hidden_states(tmp_path: Path) -> None:
    theirs = save_random("StableLmConfig", DRIVABLE["StableLmConfig"], tmp_path)
    ours = load_model(str(tmp_path))
    paged = PagedTexts(ours, 1, 64)
    states = all_states(paged)
    with torch.no_grad():
        expected = theirs(torch.tensor([TEXTS[0]]), output_hidden_states=True).hidden_states
    for state in range(ours.config.num_layers):
        torch.testing.assert_close(states[state], expected[state][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[-1], expected[-1][0], rtol=1e-4, atol=1e-4)  # after the final norm


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("MambaConfig", {"vocab_size": 307, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
        ("BloomConfig", {"vocab_size": 307, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ],
)
def test_what_cannot_be_driven_is_refused(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    save_random(name, options, tmp_path)
    with pytest.raises(CheckpointError, match="cannot be run with a paged KV cache"):
        load_model(str(tmp_path))


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    save_random("StableLmConfig", DRIVABLE["StableLmConfig"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(tmp_path))
