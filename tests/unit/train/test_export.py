from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from dynaspec.contract.errors import CheckpointError
from dynaspec.train import model as model_module
from dynaspec.train.data import save_tokenizer
from dynaspec.train.model import build, export, load_exported, round_weights

from .conftest import TINY


@pytest.fixture
def exported(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "tokenizer", 128)
    model = build(TINY, seed=4)
    export(model, tmp_path / "tokenizer", tmp_path / "out" / "target")
    return model, tmp_path


def test_transformers_loads_the_same_logits(exported):
    model, folder = exported
    loaded = AutoModelForCausalLM.from_pretrained(folder / "out" / "target", dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    ids = AutoTokenizer.from_pretrained(folder / "out" / "target")("def f(x):\n", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, round_weights(model)(ids).logits)
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=0.05)


def test_layout_is_complete(exported):
    _, folder = exported
    out = folder / "out" / "target"
    names = {p.name for p in out.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)
    assert [p.name for p in out.parent.iterdir()] == ["target"]


def test_a_faulty_export_leaves_the_old_one(exported, monkeypatch):
    _, folder = exported
    before = (folder / "out" / "target" / "model.safetensors").read_bytes()

    def fail(*_):
        raise CheckpointError("logits differ")

    monkeypatch.setattr(model_module, "check", fail)
    with pytest.raises(CheckpointError):
        export(build(TINY, seed=5), folder / "tokenizer", folder / "out" / "target")
    assert (folder / "out" / "target" / "model.safetensors").read_bytes() == before
    assert [p.name for p in (folder / "out").iterdir()] == ["target"]


def test_a_missing_export_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="holds no model, expected what the stage 'export' writes"):
        load_exported(tmp_path, torch.device("cpu"))
