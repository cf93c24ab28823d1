"""Checkpoints in the format of compressed-tensors, packed here number by number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PROJECTIONS = "_proj.weight"
"""How the names of matrices end that ``save`` quantises: not those of the head."""


def scheme(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    """A group of ``config_groups``: scales for ``group`` inputs, or None = for all of an output."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
    }
    return {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}


def quantization_config(*schemes: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """As config.json has it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": one for number, one in enumerate(schemes)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        **changed,
    }


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, words] int32: numbers [rows, n] of 0 … 2^bits − 1, the first ones in a word's lowest bits."""
    each = 32 // bits
    words = torch.zeros(len(numbers), -(-numbers.shape[1] // each), dtype=torch.int64)
    for at in range(numbers.shape[1]):
        words[:, at // each] += numbers[:, at].long() << at % each * bits
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


def quantised(
    weight: torch.Tensor, bits: int, group: int | None, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that stand for a matrix [out, in], by their names' ends, and the float32 numbers that they mean.

    Args:
        dtype: of scales.
    """
    out, width = weight.shape
    largest, middle = (1 << bits) - 1, 1 << bits - 1
    parts = weight.reshape(out, -1, group or width)
    if symmetric:
        scale = (parts.abs().amax(2) / middle).to(dtype)
        zero = torch.full(scale.shape, float(middle))
    else:
        scale = ((parts.amax(2).clamp(min=0) - parts.amin(2).clamp(max=0)) / largest).to(dtype)
        zero = (-parts.amin(2).clamp(max=0) / scale.float()).round().clamp(0, largest)
    numbers = (parts / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, largest)
    meant = ((numbers - zero[:, :, None]) * scale.float()[:, :, None]).reshape(out, width)
    tensors = {
        "packed": packed(numbers.reshape(out, width), bits),
        "scale": scale,
        "shape": torch.tensor([out, width]),
    }
    if not symmetric:
        tensors["zero_point"] = packed(zero.T, bits).T.contiguous()
    return tensors, meant


def save(source: Path, folder: Path, bits: int, group: int | None, symmetric: bool = True) -> tuple[Path, Path]:
    """Two copies of a checkpoint: ``folder``/packed with its projections quantised, and ``folder``/widened with the
    numbers that they stand for in plain float32."""
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain[name] = tensor
        if name.endswith(PROJECTIONS):
            parts, plain[name] = quantised(tensor.float(), bits, group, symmetric)
            stored |= {f"{name}_{part}": one for part, one in parts.items()}
        else:
            stored[name] = tensor
    config = json.loads((source / "config.json").read_text("utf-8"))
    for name, tensors, more in (
        ("packed", stored, {"quantization_config": quantization_config(scheme(bits, group, symmetric))}),
        ("widened", plain, {}),
    ):
        shutil.copytree(source, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | more), "utf-8")
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    return folder / "packed", folder / "widened"
