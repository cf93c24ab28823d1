from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from dynaspec.train.heads.basis import Basis
from dynaspec.train.heads.eagle import Eagle3, Eagle3Head
from dynaspec.train.heads.export import export_head
from dynaspec.train.heads.head import join
from unit.train.heads.conftest import VOCABULARY, example
from unit.train.heads.naive import draft_logits


def test_the_checkpoint_drafts_as_the_trained_head_does(head: Eagle3Head, tmp_path) -> None:
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()  # what the file can hold
    one = example(3, 5, seed=1)
    export_head(tmp_path, head, {}, {}, "# card")
    weights = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        outputs = list(head.unroll(join([one]), 3))
        wanted = head.lm_head(outputs[2].read)[0]
    # The states in the cache are divided by the scale; the file's fc reads them as the target gives them.
    states = one.aux * head.get_buffer("scale")
    got = draft_logits(weights, head.shape, head.get_buffer("embedding"), one.tokens, states, start=2, depth=2)
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)
    assert got.argmax() == wanted.argmax()


def test_names_and_types_are_the_formats(head: Eagle3Head, tmp_path) -> None:
    basis = Basis(head.shape, VOCABULARY, head.get_buffer("scale"), head.get_buffer("embedding"), head.output, None)
    config = Eagle3().config(basis, "a/target", ["LlamaForCausalLM"], 5)
    export_head(tmp_path, head, config, {"a": 1}, "# c")
    weights = load_file(tmp_path / "model.safetensors")
    layer = {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"} | {
        f"layers.0.{n}.weight"
        for n in (
            "input_layernorm",
            "hidden_norm",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    }
    assert set(weights) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} | layer
    assert weights["d2t"].dtype == torch.int64
    assert weights["t2d"].dtype == torch.bool
    assert weights["layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    assert all(t.dtype == torch.bfloat16 for n, t in weights.items() if n not in ("d2t", "t2d"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]
    }  # fmt: skip
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["norm_before_residual"] is head.shape.norm_before_residual
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "training.json",
    ]
