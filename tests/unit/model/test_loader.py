from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from parity.paging import in_passes

from . import tiny

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.write(tmp_path)


def logits(model: Model) -> torch.Tensor:
    return in_passes(model, [TEXT], [(len(TEXT),)])[0]


def test_describes_itself(checkpoint: Path) -> None:
    model = load_model(str(checkpoint))
    config = model.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (2, 32, 50)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (2, 1, 16, 64)
    assert config.eos_token_ids == (2,)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.kv_bytes_per_block == 2 * 2 * 16 * 16 * 4
    keys, values = model.kv_shapes(5)
    assert keys[0] == values[0] == 5


def test_end_tokens_of_the_generation_config_are_added(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_model(str(checkpoint)).config.eos_token_ids == (2, 7)


def test_rotary_settings_old_and_new(tmp_path: Path) -> None:
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
    ]
    found = [logits(load_model(str(tiny.write(tmp_path, spelling)))) for spelling in spellings]
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits(load_model(str(tiny.write(tmp_path)))))


def test_max_model_len(checkpoint: Path) -> None:
    assert load_model(str(checkpoint), max_model_len=20).config.max_position == 20
    for wrong in (0, 1, 65):
        with pytest.raises(ConfigError, match=f"max_model_len is {wrong}; expected 2 … 64"):
            load_model(str(checkpoint), max_model_len=wrong)


@pytest.mark.parametrize("device", ["tpu9", "meta", "cuda"])
def test_bad_device(checkpoint: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=f"device is '{device}'"):
        load_model(str(checkpoint), device=device)


def test_bad_dtype(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load_model(str(checkpoint), dtype="int8")


def test_float16_on_cpu_is_possible_and_warns(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact = logits(load_model(str(checkpoint)))
    with caplog.at_level(logging.WARNING):
        model = load_model(str(checkpoint), dtype="float16")
    assert "reference kernels" in caplog.text
    assert model.dtype == model.product_dtype == torch.float16
    assert (logits(model) - exact).abs().max() < 0.05 * exact.abs().max()


def test_bfloat16_on_cpu_rounds_what_products_take(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact = logits(load_model(str(checkpoint)))
    with caplog.at_level(logging.WARNING):
        model = load_model(str(checkpoint), dtype="bfloat16")
    assert not caplog.text
    assert (model.dtype, model.product_dtype) == (torch.float32, torch.bfloat16)
    assert not torch.equal(logits(model), exact)
    assert (logits(model) - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "expected a causal language model"),
        ({"architectures": []}, "names 0 architectures"),
        ({"model_type": "never_heard_of_it"}, "model_type never_heard_of_it"),
        ({"hidden_size": 64}, "shape"),
        ({"num_hidden_layers": 3}, r"lacks the tensor model\.layers\.2"),
        ({"num_hidden_layers": 1}, "no place for"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_config_and_weights_that_do_not_fit(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    tiny.write(tmp_path, config)
    with pytest.raises(CheckpointError, match=message):
        load_model(str(tmp_path))


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_model(str(tmp_path))


def test_transformers_is_imported_only_when_a_model_is_loaded() -> None:
    code = "import sys, dynaspec.model.loader; sys.exit(any(m in sys.modules for m in ('transformers', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
