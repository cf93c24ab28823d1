"""Medusa heads and MLP speculators: what they compute, in every published layout, and what is said of those that cannot
be right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dynaspec.contract.errors import CheckpointError
from dynaspec.control.checkpoint import checkpoint_method
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.model.state_heads.base import StateHeads
from dynaspec.model.state_heads.medusa import load_medusa
from dynaspec.model.state_heads.mlp_speculator import load_mlp_speculator
from support.state_heads import LAYOUTS, Layout, published, random_tensors, reference, write
from unit.model import tiny

BY_NAME = {layout.name: layout for layout in LAYOUTS}
LOADERS = {"medusa": load_medusa, "mlp_speculator": load_mlp_speculator}
STATES = torch.randn(6, 32, generator=torch.Generator().manual_seed(5))
CHAINS = torch.randint(0, 50, (6, 8), generator=torch.Generator().manual_seed(6))
OLD, CONVERTED, MLP, TIED = (BY_NAME[name] for name in ("medusa 0.1", "vllm, some tokens", "accelerator", "tied"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(tiny.write(tmp_path_factory.mktemp("tiny"))))


def load(layout: Layout, path: Path, model: Model) -> Any:
    return LOADERS[layout.method](str(path), model)


def logits_of(heads: StateHeads) -> torch.Tensor:
    """[requests, heads, drafted vocabulary]"""
    state, found = heads.begin(STATES.clone()), []
    for head in range(heads.longest):
        state, logits = heads.run(head, state, CHAINS[:, head].contiguous())
        found.append(logits)
    return torch.stack(found, 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_heads_compute_what_their_layout_says(layout: Layout, model: Model, tmp_path: Path) -> None:
    """Compiled, and by single operations; a row alone is the row among others."""
    path, tensors = write(layout, tmp_path), random_tensors(layout)
    heads = load(layout, path, model)
    assert heads.longest == layout.heads
    expected = torch.stack(
        [reference(layout, tensors, STATES[i], CHAINS[i, : layout.heads].tolist()) for i in range(len(STATES))]
    )
    compiled = logits_of(heads)
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-4)
    ids = None if heads.vocabulary is None else heads.vocabulary.tolist()
    assert ids == (tensors["ids"].tolist() if "ids" in tensors else None)
    heads.compiled = None
    torch.testing.assert_close(logits_of(heads), expected, rtol=1e-4, atol=1e-4)
    assert checkpoint_method(path) == layout.method


def test_output_layers_that_are_one_are_read_once(model: Model, tmp_path: Path) -> None:
    for name in ("vllm, one head for all", "vllm, the first for all", "tied"):
        heads = load(BY_NAME[name], write(BY_NAME[name], tmp_path / name), model)
        assert len({id(output) for output in heads._weights.outputs}) == 1


def test_heads_count_as_many_as_the_file_holds(model: Model, tmp_path: Path) -> None:
    """Uploads' configs say 2 where there are 5. More than there are is an error."""
    for layout in (OLD, replace(OLD, heads=5), replace(OLD, config={})):
        assert load(layout, write(layout, tmp_path / str(layout.heads)), model).longest == layout.heads
    more = replace(OLD, config={"medusa_num_heads": 4})
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt lacks the tensor 3\.0\.linear\.weight, of shape"):
        load(more, write(more, tmp_path / "more"), model)
    (tmp_path / "3" / "config.json").unlink()
    assert load(OLD, tmp_path / "3", model).longest == 3


def test_a_target_may_have_its_heads_in_its_own_checkpoint(tmp_path: Path) -> None:
    """It loads as if there were none, and they load as if there were nothing else."""
    layout = BY_NAME["medusa 1.0"]
    tensors = random_tensors(layout)
    tiny.write(tmp_path, {"medusa_num_heads": 3, "medusa_num_layers": 1}, tiny.tensors() | published(layout, tensors))
    target = load_model(str(tmp_path))
    assert target.config.vocab_size == 50
    heads = load_medusa(str(tmp_path), target)
    expected = reference(layout, tensors, STATES[2], [1, 1, 1])
    torch.testing.assert_close(logits_of(heads)[2], expected, rtol=1e-4, atol=1e-4)
    assert checkpoint_method(tmp_path) == "medusa"


def broken(
    tmp_path: Path, layout: Layout, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None
) -> Path:
    """Heads with other keys or tensors (two underscores for a dot); None = left out."""
    path = write(layout, tmp_path)
    named = {name.replace("__", ".").lstrip("_"): tensor for name, tensor in tensors.items()}
    changed = {name: t for name, t in (published(layout, random_tensors(layout)) | named).items() if t is not None}
    if layout.file.endswith(".safetensors"):
        save_file(changed, path / layout.file)
    else:
        torch.save(changed, path / layout.file)
    raw = json.loads((path / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_heads_that_cannot_be_right_are_refused_in_a_sentence(model: Model, tmp_path: Path) -> None:
    square, head = torch.ones(64, 64), torch.ones(60, 32)
    cases: list[tuple[Layout, dict[str, Any], dict[str, Any], str]] = [
        (OLD, {}, {"_1__0__linear__weight": None}, r"\.pt lacks the tensor 1\.0\.linear\.weight, of shape \[32, 32\]"),
        (OLD, {}, {"_2__1__weight": None}, r"\.pt lacks the tensor 2\.1\.weight, of shape \[50, 32\]"),
        (OLD, {}, {"_0__1__weight": None}, r"\.pt lacks the tensor 0\.1\.weight, of shape \[50, 32\]"),
        (OLD, {}, {"_0__0__linear__weight": square}, r"0\.0\.linear\.weight has shape \[64, 64\].*\.pt.*\[32, 32\]"),
        (OLD, {}, {"_1__1__weight": head}, r"1\.1\.weight has shape \[60, 32\] in .*\.pt;.*need \[50, 32\]"),
        (OLD, {}, {"surplus": head}, "holds 1 tensors that a Medusa checkpoint has no place for, such as surplus"),
        (CONVERTED, {}, {"lm_heads__1__weight": None}, r"lacks the tensor lm_heads\.1\.weight, of shape \[30, 32\]"),
        (
            CONVERTED,
            {},
            {"token_map": torch.full((30,), 7)},
            r"token_map in .* ids from 7 to 7, 1 different; expected 30",
        ),
        (
            CONVERTED,
            {},
            {"token_map": torch.ones(5, 6, dtype=int)},
            r"token_map in .* has shape \[5, 6\]; expected a list",
        ),
        (
            CONVERTED,
            {},
            {"token_map": torch.arange(30) + 40},
            "ids from 40 to 69, 30 different; expected 30 different ones below 50",
        ),
        (CONVERTED, {}, {"token_map": None}, r"lm_heads\.0\.weight has shape \[30, 32\].*need \[50, 32\]"),
        (CONVERTED, {"logit_scale": 0.5}, {}, r"config\.json: logit_scale is 0\.5; expected 1"),
        (MLP, {"emb_dim": 64}, {}, r"config\.json: emb_dim is 64, but the target's is 32; expected a speculator made"),
        (MLP, {"vocab_size": 60}, {}, r"config\.json: vocab_size is 60, but the target's is 50; expected a speculator"),
        (MLP, {"n_predict": 0}, {}, r"config\.json: n_predict is 0; expected a number of at least 1"),
        (MLP, {"inner_dim": "24"}, {}, r"config\.json: inner_dim is '24'; expected a number"),
        (MLP, {}, {"ln__2__bias": None}, r"model\.safetensors lacks the tensor ln\.2\.bias, of shape \[24\]"),
        (MLP, {}, {"proj__1__weight": head}, r"proj\.1\.weight has shape \[60, 32\] in .*need \[24, 24\]"),
        (MLP, {"n_predict": 2}, {}, r"holds 5 tensors that an MLP speculator has no place for, such as emb\.2\.weight"),
        (TIED, {}, {"proj__1__weight": None}, r"lacks the tensor proj\.1\.weight"),
        (MLP, {}, {"forget_emb__0__weight": head}, r"is an LSTM speculator \(Arctic\), which is not available"),
        (MLP, {"method": "sum_lstm", "inner_dim": "24"}, {}, "is an LSTM speculator"),
    ]
    for n, (layout, config, tensors, sentence) in enumerate(cases):
        path = broken(tmp_path / str(n), layout, config, **tensors)
        with pytest.raises(CheckpointError, match=sentence):
            load(layout, path, model)


def test_a_file_without_heads_is_refused(model: Model, tmp_path: Path) -> None:
    tiny.write(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors lacks the tensor 0\.0\.linear\.weight, the first"):
        load_medusa(str(tmp_path), model)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt is not a readable PyTorch checkpoint"):
        load_medusa(str(tmp_path), model)
    torch.save({"0.0.linear.weight": [1.0]}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="holds other things than tensors"):
        load_medusa(str(tmp_path), model)
