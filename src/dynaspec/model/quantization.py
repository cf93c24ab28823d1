"""Quantising a model's weights while they are loaded, and checkpoints that others have quantised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from dynaspec.contract.errors import CheckpointError, ConfigError

from .linear import can_pack

Quantization = Literal["int8", "int4"]
"""What the weights of linear layers become: see ``kernels.int8`` and ``kernels.int4``."""


def of_head(wanted: Quantization | None) -> Quantization | None:
    """What the output layer becomes: int8 where others are int4, as it loses most by that."""
    return "int8" if wanted == "int4" else wanted


def check_quantization(wanted: Quantization | None, device: torch.device, dtype: torch.dtype) -> None:
    """
    Raises:
        ConfigError: it is not available where the model is to run.
    """
    if wanted is not None and not can_pack(device, dtype):
        raise ConfigError(
            f"quantization is {wanted!r} but the model runs on {device.type} in {str(dtype).removeprefix('torch.')}; "
            "expected no quantization, or device 'cpu' with dtype 'auto', 'float32' or 'bfloat16'"
        )


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a tensor holds numbers, rather than what some quantisation has made of them."""
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def check_not_quantised(directory: Path, config: Mapping[str, Any]) -> None:
    """
    Args:
        config: the checkpoint's config.json.

    Raises:
        CheckpointError: its weights are not plain numbers.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return
    method = found.get("quant_method") or found.get("quant_algo") if isinstance(found, dict) else found
    raise CheckpointError(
        f"{directory} is quantised with {method or 'a method that its config.json does not name'}, which is not read; "
        "expected float32, bfloat16 or float16 weights, or a GGUF file (quantization='int8' or 'int4' quantises those "
        "when they are loaded)"
    )
