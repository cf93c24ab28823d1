"""Heads whose matrices are int8: a target's is left as it is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.model.decoder import Model
from dynaspec.model.decoder_heads import load_head
from dynaspec.model.kernels import gemm
from dynaspec.model.linear import Linear
from dynaspec.model.loader import load_model
from dynaspec.model.packed import PackedLinear
from support import compressed
from support.decoder_heads import LAYOUTS, Layout, random_tensors, reference, write
from support.head_passes import logits_of, states_of
from support.quantised import Rounding, rounded
from unit.model import tiny

TEXT = np.random.default_rng(0).integers(3, 50, 37).tolist()
CHAIN = [7, 30, 7, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(tiny.write(tmp_path_factory.mktemp("tiny"))))


def is_int8(linear: Linear | None) -> bool:
    return isinstance(linear, PackedLinear) and linear.form == gemm.INT8


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_it_computes_with_the_widened_matrices(layout: Layout, model: Model, tmp_path: Path) -> None:
    head, s = load_head(layout.method, str(write(layout, tmp_path)), model, quantization="int8"), layout.shape
    tensors = {
        name: Rounding(rounded(tensor)) if tensor.ndim == 2 and "embed" not in name else tensor
        for name, tensor in random_tensors(layout).items()
    }
    states = states_of(model, TEXT, s.states)
    embedding, output = tiny.tensors()["model.embed_tokens.weight"], tiny.tensors()["lm_head.weight"]
    expected = reference(layout, tensors, embedding, output, TEXT, states[:-1], CHAIN)
    whole = logits_of(head, states, TEXT, CHAIN, len(TEXT))
    # An input that lies between two integers may become the other one, where sums run in another order.
    torch.testing.assert_close(whole, expected, rtol=0, atol=float(0.02 * expected.std()))
    assert torch.equal(logits_of(head, states, TEXT, CHAIN, 5), whole)
    weights = head._weights
    assert all(is_int8(one) for layer in weights.layers for one in (layer.qkv, layer.out, layer.up, layer.down))
    assert is_int8(weights.fusion) or weights.fusion is None
    assert is_int8(weights.head) == layout.own_head
    assert (weights.head is model.head) == (not layout.own_head)


def test_it_needs_the_compiled_path(tmp_path: Path) -> None:
    target = load_model(str(tiny.write(tmp_path)), dtype="float16")
    with pytest.raises(ConfigError, match="the model runs on cpu in float16"):
        load_head("eagle3", str(tmp_path), target, quantization="int8")


def test_a_head_that_is_quantised_already(model: Model, tmp_path: Path) -> None:
    path = write(LAYOUTS[1], tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    load_head("eagle3", str(path), model)  # a config that was copied from a quantised target
    stored = load_file(path / "model.safetensors")
    name = next(name for name in stored if name.endswith("up_proj.weight"))
    save_file(stored | {name: stored[name].to(torch.float8_e4m3fn)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is quantised with fp8"):
        load_head("eagle3", str(path), model)


def test_a_head_whose_weights_are_packed(model: Model, tmp_path: Path) -> None:
    path = write(LAYOUTS[1], tmp_path)
    config = json.loads((path / "config.json").read_text())
    found = compressed.quantization_config(compressed.scheme(4, None))
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": found}))
    stored = load_file(path / "model.safetensors")
    name = next(name for name in stored if name.endswith("up_proj.weight"))
    parts, _ = compressed.quantised(stored.pop(name).float(), 4, None)
    save_file(stored | {f"{name}_{part}": one for part, one in parts.items()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is quantised with compressed-tensors"):
        load_head("eagle3", str(path), model)
