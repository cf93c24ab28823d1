"""Models whose weights are quantised when they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.model.decoder import Decoder, Model, Weights
from dynaspec.model.gguf.file import GgufFile
from dynaspec.model.kernels import gemm, integer_blocks
from dynaspec.model.linear import check_quantization
from dynaspec.model.loader import load_model
from dynaspec.model.packed import PackedLinear
from dynaspec.model.reader import Reader
from parity.paging import in_passes
from support.checkpoints import FAMILIES, save_pair
from support.quantised import assert_near, rounded, unpacked

from . import tiny
from .gguf_files import files

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

TEXT = [3, 14, 15, 22, 35, 9, 32, 38, 46, 26, 43, 38, 2, 40, 28, 44]
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def logits(model: Model, *sizes: int) -> torch.Tensor:
    return in_passes(model, [TEXT], [(size,) for size in sizes])[0]


def weights_of(model: Model) -> Weights:
    assert isinstance(model, Decoder)
    return model.weights


def packed(model: Model) -> list[PackedLinear]:
    weights = weights_of(model)
    matrices = [one for layer in weights.layers for one in (layer.qkv, layer.out, layer.up, layer.down)]
    return [one for one in (*matrices, weights.head) if isinstance(one, PackedLinear)]


def assert_int8_of(found: Model, widened: Model) -> None:
    """That a model is the other one, in float32, whose matrices hold int8 numbers already."""
    for one, other in zip(packed(found), packed(widened), strict=True):
        assert (one.form, other.form) == (gemm.INT8, gemm.FLOAT)
        meant = unpacked(other)
        np.testing.assert_array_equal(unpacked(one)[:, : meant.shape[1]], meant)
        np.testing.assert_array_equal(one.packed, integer_blocks.pack_int8(integer_blocks.quantise_int8(meant)))
        np.testing.assert_array_equal(one.bias, other.bias)
    assert_near(logits(found, 5, 11), logits(widened, 5, 11))


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_model_has_the_numbers_of_the_widened_one(tied: bool, tmp_path: Path) -> None:
    tensors = tiny.tensors()
    if tied:
        del tensors["lm_head.weight"]
    config = {"tie_word_embeddings": tied}
    folders = [tmp_path / name for name in ("given", "widened")]
    for folder in folders:
        folder.mkdir()
    found = load_model(str(tiny.write(folders[0], config, tensors)), quantization="int8")
    assert {one.form for one in packed(found)} == {gemm.INT8}
    assert len(packed(found)) == 2 * 4 + 1
    # The head is quantised where it is tied too; the table that tokens are looked up in is not.
    assert torch.equal(found.embedding, tensors["model.embed_tokens.weight"])
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    changed = {
        name: rounded(weight) if any(part in name for part in MATRICES) else weight for name, weight in tensors.items()
    }
    widened = tiny.write(folders[1], {"tie_word_embeddings": False}, changed | {"lm_head.weight": rounded(head)})
    assert_int8_of(found, load_model(str(widened)))
    assert torch.equal(logits(found, *[1] * 16), logits(found, 5, 11))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_pair(tmp_path, family).target
    found = load_model(path, quantization="int8")
    assert len(packed(found)) == 2 * 4 + 1
    assert {one.form for one in packed(found)} == {gemm.INT8}
    # The same in float32; a matrix that is rounded a second time stays as it is.
    monkeypatch.setattr(Reader, "_quantised", lambda self, weight, name, form: rounded(weight))
    widened = load_model(path, quantization="int8")
    assert_int8_of(found, widened)


def stored_and_loaded(path: Path, kind: Kind, **options: Any) -> tuple[Model, Model]:
    files.write(path, files.random_model("LlamaConfig", **options), kind)
    return load_model(str(path), quantization="int8"), load_model(str(path), dtype="float32")


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_in_q8_0_loses_nothing(tied: bool, tmp_path: Path) -> None:
    found, widened = stored_and_loaded(tmp_path / "model.gguf", Kind.Q8_0, tie_word_embeddings=tied)
    assert_int8_of(found, widened)
    assert torch.equal(found.embedding, widened.embedding)


def test_blocks_of_a_gguf_file_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"))
    monkeypatch.delattr(integer_blocks, "quantise_int8")  # nothing is quantised a second time
    found = weights_of(load_model(str(path), quantization="int8"))
    file = GgufFile(path)
    for layer, number in zip(found.layers, range(2), strict=True):
        raw = file.data(file.tensors[f"blk.{number}.ffn_down.weight"]).reshape(64, -1, 34)
        assert isinstance(layer.down, PackedLinear)
        np.testing.assert_array_equal(layer.down.packed, integer_blocks.pack_int8(raw.copy()))


@pytest.mark.parametrize("kind", [Kind.Q5_1, Kind.F16])
def test_other_kinds_are_quantised_from_the_very_numbers_that_they_stand_for(kind: Kind, tmp_path: Path) -> None:
    theirs = files.random_model("LlamaConfig")
    path = files.write(tmp_path / "model.gguf", theirs, kind, dtype=torch.float32)
    found = weights_of(load_model(str(path), quantization="int8"))
    for layer, values in zip(found.layers, theirs.model.layers, strict=True):
        assert isinstance(layer.down, PackedLinear)
        blocks = integer_blocks.quantise_int8(values.mlp.down_proj.weight.detach().numpy())
        np.testing.assert_array_equal(layer.down.packed, integer_blocks.pack_int8(blocks))


def test_int8_needs_the_compiled_path(tmp_path: Path) -> None:
    path = str(tiny.write(tmp_path))
    with pytest.raises(ConfigError) as refused:
        load_model(path, dtype="float16", quantization="int8")
    assert "quantization is 'int8' but the model runs on cpu in float16; expected" in str(refused.value)


def test_int8_is_for_the_cpu() -> None:
    check_quantization(None, torch.device("cuda"), torch.float16)
    with pytest.raises(
        ConfigError, match="the model runs on cuda in float32; expected no quantization, or device 'cpu'"
    ):
        check_quantization("int8", torch.device("cuda"), torch.float32)


def test_models_that_run_on_transformers_code_are_not_quantised(tmp_path: Path) -> None:
    path = str(tiny.write(tmp_path, {"hidden_act": "mish"}))
    with pytest.raises(ConfigError, match=r"quantization is 'int8' but .* runs on Transformers' own modelling code"):
        load_model(path, quantization="int8")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised with gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised with fp8"),
        ({"quantization_config": {"quant_algo": "FP8"}}, "is quantised with FP8"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "is quantised with compressed-tensors"),
        ({"quantization_config": {"bits": 4}}, "is quantised with a method that its config.json does not name"),
    ],
)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_checkpoints_that_are_quantised_already(
    config: dict[str, Any], words: str, quantization: Any, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_model(str(tiny.write(tmp_path, config)), quantization=quantization)
    assert words in str(refused.value)
    assert "expected float32, bfloat16 or float16 weights, or a GGUF file" in str(refused.value)


def test_a_checkpoint_that_says_it_is_not_quantised(tmp_path: Path) -> None:
    load_model(str(tiny.write(tmp_path, {"quantization_config": None})))


def test_weights_that_cannot_be_quantised(tmp_path: Path) -> None:
    tensors = tiny.tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    path = str(tiny.write(tmp_path, weights=tensors))
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight cannot be quantised to int8: a weight is nan"
    ):
        load_model(path, quantization="int8")


def matrices(model: Model) -> list[PackedLinear]:
    return [one for one in packed(model) if one is not weights_of(model).head]


@pytest.mark.parametrize("family", FAMILIES)
def test_int4_in_every_family(family: str, tmp_path: Path) -> None:
    found = load_model(save_pair(tmp_path, family).target, quantization="int4")
    assert {one.form for one in matrices(found)} == {gemm.INT4}
    assert len(matrices(found)) == 2 * 4
    head = weights_of(found).head
    assert isinstance(head, PackedLinear)
    assert head.form == gemm.INT8
    assert torch.equal(logits(found, 5, 11), logits(found, *[1] * 16))


@pytest.mark.parametrize("tied", [False, True])
def test_an_int4_model_has_the_numbers_of_the_widened_one(tied: bool, tmp_path: Path) -> None:
    tensors = tiny.tensors()
    if tied:
        del tensors["lm_head.weight"]
    folders = [tmp_path / name for name in ("given", "widened")]
    for folder in folders:
        folder.mkdir()
    found = load_model(str(tiny.write(folders[0], {"tie_word_embeddings": tied}, tensors)), quantization="int4")
    changed = {
        name: rounded(weight, "int4") if any(part in name for part in MATRICES) else weight
        for name, weight in tensors.items()
    }
    head = rounded(tensors["model.embed_tokens.weight" if tied else "lm_head.weight"], "int8")
    widened = tiny.write(folders[1], {"tie_word_embeddings": False}, changed | {"lm_head.weight": head})
    expected = load_model(str(widened))
    for one, other in zip(packed(found), packed(expected), strict=True):
        meant = unpacked(other)
        np.testing.assert_array_equal(unpacked(one)[:, : meant.shape[1]], meant)
    assert_near(logits(found, 5, 11), logits(expected, 5, 11))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1])
def test_int4_blocks_of_a_gguf_file_are_taken_as_they_are(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"), kind, dtype=torch.float32)
    monkeypatch.setattr(
        integer_blocks, "quantise_int4", lambda weight: pytest.fail("a matrix is quantised a second time")
    )
    found = load_model(str(path), quantization="int4")
    file = GgufFile(path)
    for layer, number in zip(weights_of(found).layers, range(2), strict=True):
        raw = file.data(file.tensors[f"blk.{number}.ffn_down.weight"]).reshape(64, 3, -1).copy()
        blocks = raw if kind == Kind.Q4_1 else integer_blocks.from_symmetric(raw)
        assert isinstance(layer.down, PackedLinear)
        np.testing.assert_array_equal(layer.down.packed, integer_blocks.pack_int4(blocks))
    widened = load_model(str(path), dtype="float32")
    assert_near(logits(found, 5, 11), logits(widened, 5, 11))


def test_a_q4_0_file_whose_scale_is_too_large(tmp_path: Path) -> None:
    path = files.write(tmp_path / "model.gguf", files.random_model("LlamaConfig"), Kind.Q4_0)
    file = GgufFile(path)
    start = file.tensors["blk.1.ffn_up.weight"].start
    data = bytearray(path.read_bytes())
    data[start : start + 2] = np.float16(9000).tobytes()
    path.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"the tensor blk\.1\.ffn_up\.weight in Q4_0: a scale is 9000\.0; expected"
    ):
        load_model(str(path), quantization="int4")
