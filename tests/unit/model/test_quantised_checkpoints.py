"""Checkpoints in the format of compressed-tensors with quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.kernels import gemm
from dynaspec.model.loader import load_model
from dynaspec.model.quantised_checkpoints import CompressedCheckpoint, unpack
from dynaspec.model.weights import read_json
from support import compressed
from support.checkpoints import FAMILIES, random_model
from support.quantised import assert_near, unpacked, widened

from . import tiny
from .gguf_files import files
from .test_quantization import logits, packed

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

FORMS = {4: gemm.INT4, 8: gemm.INT8}
NAMES = {4: "int4", 8: "int8"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose widths are multiples of 32."""
    folder = tmp_path_factory.mktemp("source")
    files.random_model("LlamaConfig", tie_word_embeddings=False).save_pretrained(folder)
    return folder


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> CompressedCheckpoint:
    save_file({f"x.weight_{part}": one for part, one in tensors.items()}, folder / "model.safetensors")
    return CompressedCheckpoint(folder)


@pytest.mark.parametrize(
    ("bits", "numbers", "words"),
    [
        (4, [[0, 7, 14, 5, 12, 3, 10, 1, 8], [15, 6, 13, 4, 11, 2, 9, 0, 7]], [[440163952, 8], [153832815, 7]]),
        (
            8,
            [[0, 29, 58, 87, 116, 145, 174, 203, 232], [5, 34, 63, 92, 121, 150, 179, 208, 237]],
            [[1463426304, -877751948, 232], [1547641349, -793536903, 237]],
        ),
    ],
)
def test_words_are_those_that_the_format_s_own_package_packs(
    bits: int, numbers: list[list[int]], words: list[list[int]]
) -> None:
    """Written down from compressed-tensors 0.20."""
    found, stored = torch.tensor(numbers), torch.tensor(words, dtype=torch.int32)
    assert torch.equal(unpack(stored, bits, 9).long(), found)
    assert torch.equal(compressed.packed(found, bits), stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 96, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers(bits: int, group: int | None, symmetric: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors, meant = compressed.quantised(torch.randn(37, 192), bits, group, symmetric, dtype)
    stored = checkpoint(tmp_path, tensors)
    assert "x.weight" in stored
    assert torch.equal(stored.take("x.weight", (37, 192)), meant)
    blocks = stored.blocks("x.weight", (37, 192), None)
    stored.check_all_taken()
    if bits == 8 and not symmetric:
        assert blocks is None
        return
    assert blocks is not None
    found = widened(blocks, NAMES[bits], 192)
    if symmetric and dtype != torch.float32:
        assert torch.equal(found, meant)
    else:  # the scale or the minimum is the nearest float16
        steps = 32 if bits == 4 else 128  # of a scale: a number and a minimum, each 2⁻¹¹ off at most
        bound = float(tensors["scale"].float().max()) * steps * 2**-11
        torch.testing.assert_close(found, meant, rtol=0, atol=bound)


@pytest.mark.parametrize("bits", [4, 8])
def test_widths_that_fill_no_last_block(bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors, meant = compressed.quantised(torch.randn(33, 72), bits, None)
    blocks = checkpoint(tmp_path, tensors).blocks("x.weight", (33, 72), None)
    assert blocks is not None
    assert torch.equal(widened(blocks, NAMES[bits], 72), meant)


def test_zero_points_of_few_outputs(tmp_path: Path) -> None:
    """They fill a single word."""
    tensors, meant = compressed.quantised(torch.randn(5, 96), 4, 32, symmetric=False)
    assert torch.equal(checkpoint(tmp_path, tensors).take("x.weight", (5, 96)), meant)


def test_groups_that_no_block_takes_are_read_as_numbers(tmp_path: Path) -> None:
    tensors, meant = compressed.quantised(torch.randn(8, 96), 4, 48)
    stored = checkpoint(tmp_path, tensors)
    assert stored.blocks("x.weight", (8, 96), None) is None
    assert torch.equal(stored.take("x.weight", (8, 96)), meant)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_model(bits: int, group: int | None, symmetric: bool, source: Path, tmp_path: Path) -> None:
    path, plain = compressed.save(source, tmp_path, bits, group, symmetric)
    found, expected = load_model(str(path)), load_model(str(plain))
    stays = bits == 8 and not symmetric
    forms = {one.form for one in packed(found)[:-1]}
    assert forms == {one.form for one in packed(expected)[:-1]} if stays else forms == {FORMS[bits]}
    assert packed(found)[-1].form == packed(expected)[-1].form  # the head is to be ignored
    mine, theirs = logits(found, 5, 11), logits(expected, 5, 11)
    if stays:
        assert torch.equal(mine, theirs)
    else:
        assert_near(mine, theirs)
    for one, other in zip(packed(found), packed(expected), strict=True):
        depth = unpacked(other).shape[1]
        numbers, meant = unpacked(one)[:, :depth], unpacked(other)
        if bits == 8 or symmetric:
            np.testing.assert_array_equal(numbers, meant)
        else:  # minimums are the nearest float16
            np.testing.assert_allclose(numbers, meant, rtol=0, atol=float(np.abs(meant).max()) * 2**-11)
    assert torch.equal(logits(found, *[1] * 16), mine)
    assert not torch.equal(logits(load_model(str(source)), 5, 11), theirs)


def test_a_fused_matrix_of_several_forms(source: Path, tmp_path: Path) -> None:
    """Of a layer's queries, keys and values, and of its gate and up, one alone is quantised, or otherwise."""
    tensors, plain = load_file(source / "model.safetensors"), {}
    stored = {}
    for name, tensor in tensors.items():
        bits = {"q_proj": 4, "k_proj": 8, "up_proj": 4}.get(name.split(".")[-2])
        stored[name] = plain[name] = tensor
        if bits is not None:
            parts, plain[name] = compressed.quantised(tensor, bits, 32)
            del stored[name]
            stored |= {f"{name}_{part}": one for part, one in parts.items()}
    config = {"quantization_config": compressed.quantization_config(*(compressed.scheme(bits, 32) for bits in (4, 8)))}
    folders = [tmp_path / "packed", tmp_path / "plain"]
    raw = read_json(source / "config.json")
    for folder, found, more in zip(folders, (stored, plain), (config, {}), strict=True):
        folder.mkdir()
        tiny.write(folder, raw | more, found)
    found, expected = (load_model(str(folder)) for folder in folders)
    assert torch.equal(logits(found, 5, 11), logits(expected, 5, 11))


def test_where_blocks_do_not_run_weights_are_widened(source: Path, tmp_path: Path) -> None:
    path, plain = compressed.save(source, tmp_path, 4, 32)
    found, expected = (load_model(str(folder), dtype="float16") for folder in (path, plain))
    assert packed(found) == []
    assert torch.equal(logits(found, 16), logits(expected, 16))


def test_another_form_that_is_asked_for(source: Path, tmp_path: Path) -> None:
    """Numbers in four bits, brought to int8: a second rounding, of what they stand for."""
    path, plain = compressed.save(source, tmp_path, 4, 32)
    found, expected = (load_model(str(folder), quantization="int8") for folder in (path, plain))
    assert {one.form for one in packed(found)} == {gemm.INT8}
    assert torch.equal(logits(found, 16), logits(expected, 16))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3", "opt"])
def test_families(family: str, tmp_path: Path) -> None:
    config_name, options = FAMILIES[family]
    random_model(config_name, options, 1).save_pretrained(tmp_path / "source")
    path, plain = compressed.save(tmp_path / "source", tmp_path, 8, None)
    found, expected = load_model(str(path)), load_model(str(plain))
    for one, other in zip(packed(found), packed(expected), strict=True):
        meant = unpacked(other)
        np.testing.assert_array_equal(unpacked(one)[:, : meant.shape[1]], meant)
    assert_near(logits(found, 5, 11), logits(expected, 5, 11))


def changed(**weights: Any) -> dict[str, Any]:
    one = compressed.scheme(4, 32)
    return compressed.quantization_config(one | {"weights": one["weights"] | weights})


ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (compressed.quantization_config(compressed.scheme(8, None), format="int-quantized"), "format 'int-quantized'"),
        (compressed.quantization_config(compressed.scheme(8, None), format=None), "format None"),
        (compressed.quantization_config(), "without config_groups"),
        (compressed.quantization_config({"targets": ["Linear"]}), "group_0 without weights"),
        (
            compressed.quantization_config(compressed.scheme(8, None) | {"input_activations": ACTIVATIONS}),
            "group_0 with quantised activations",
        ),
        (
            compressed.quantization_config(compressed.scheme(4, 32) | {"format": "nvfp4-pack-quantized"}),
            "group_0 in the format 'nvfp4-pack-quantized'",
        ),
        (changed(type="float", num_bits=8), "group_0 with weights of 8 bits of type 'float'"),
        (changed(num_bits=3), "group_0 with weights of 3 bits of type 'int'"),
        (changed(strategy="tensor"), "group_0 with scales by 'tensor'"),
        (changed(actorder="group"), "group_0 with actorder 'group'"),
        (
            compressed.quantization_config(compressed.scheme(4, 32), kv_cache_scheme=ACTIVATIONS),
            "with a kv_cache_scheme",
        ),
        (
            compressed.quantization_config(compressed.scheme(4, 32), sparsity_config={"format": "sparse-24-bitmask"}),
            "with sparsity in the format 'sparse-24-bitmask'",
        ),
        (
            compressed.quantization_config(compressed.scheme(4, 32), transform_config={"config_groups": {}}),
            "with a transform_config",
        ),
    ],
)
def test_what_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_model(str(tiny.write(tmp_path, {"quantization_config": config})))
    assert f"is quantised with compressed-tensors, {words}, which is not read; expected" in str(refused.value)
    assert "compressed-tensors' format pack-quantized" in str(refused.value)


def test_a_model_of_no_family(tmp_path: Path) -> None:
    config = {"hidden_act": "mish", "quantization_config": compressed.quantization_config(compressed.scheme(4, 32))}
    with pytest.raises(CheckpointError, match="compressed-tensors but runs on Transformers' own modelling code"):
        load_model(str(tiny.write(tmp_path, config)))


def test_inputs_in_an_order_of_their_own(tmp_path: Path) -> None:
    tensors, _ = compressed.quantised(torch.randn(8, 64), 4, 32)
    with pytest.raises(CheckpointError, match=r"inputs in an order of their own \(x\.weight_g_idx\), which is not"):
        checkpoint(tmp_path, tensors | {"g_idx": torch.arange(64)})


@pytest.mark.parametrize(
    ("part", "tensor", "words"),
    [
        ("packed", torch.zeros(8, 7, dtype=torch.int32), r"is int32, \[8, 7\], in .*; expected int32, \[8, 8\] or"),
        ("packed", torch.zeros(8, 8), r"x\.weight_packed is float32, \[8, 8\], in .*; expected int32"),
        ("scale", torch.zeros(8, 3), r"x\.weight_scale is float32, \[8, 3\], in .*; expected 8 rows of scales"),
        ("scale", torch.zeros(8), "expected 8 rows of scales for equal shares of 64 inputs"),
        ("scale", torch.zeros(8, 0), "expected 8 rows of scales for equal shares of 64 inputs"),
        ("scale", None, r"lacks the tensor x\.weight_scale, beside x\.weight_packed"),
        ("shape", None, r"lacks the tensor x\.weight_shape, beside x\.weight_packed"),
        ("shape", torch.tensor([8, 63]), r"x\.weight has shape \[8, 63\] in .*; its config needs \[8, 64\]"),
        (
            "zero_point",
            torch.zeros(8, 2, dtype=torch.int8),
            r"zero_point is int8, \[8, 2\], .*expected int32, \[1, 2\]",
        ),
        ("scale", torch.full((8, 2), 9000.0), "x.weight with values out of range: a scale is 9000; expected"),
        ("scale", torch.full((8, 2), float("nan")), "out of range: a scale is nan; expected"),
    ],
)
def test_tensors_that_do_not_fit(part: str, tensor: torch.Tensor | None, words: str, tmp_path: Path) -> None:
    tensors, _ = compressed.quantised(torch.randn(8, 64), 4, 32)
    tensors.pop(part, None)
    if tensor is not None:
        tensors[part] = tensor
    with pytest.raises(CheckpointError, match=words):
        checkpoint(tmp_path, tensors).blocks("x.weight", (8, 64), None)


def test_memory(source: Path, tmp_path: Path) -> None:
    found = load_model(str(compressed.save(source, tmp_path, 4, 32)[0]))
    assert packed(found)[3].packed.nbytes == 64 * 96 * 20 // 32
