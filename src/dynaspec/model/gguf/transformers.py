"""A GGUF file as a model of Transformers, for what needs its modules: training, and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .checkpoint import GgufCheckpoint
from .config import config_of
from .file import GgufFile


def transformers_config(path: Path) -> Any:
    """Transformers' config.

    Raises:
        CheckpointError: the file cannot be read, or is of an unknown architecture.
    """
    return config_of(GgufFile(path))


def transformers_model(path: Path, dtype: torch.dtype) -> Any:
    """Transformers' causal language model, its weights in ``dtype``.

    Raises:
        CheckpointError: the file cannot be read, is of an unknown architecture, or lacks a tensor.
    """
    from transformers import AutoModelForCausalLM  # here, because it takes seconds to import

    file = GgufFile(path)
    config = config_of(file)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    checkpoint = GgufCheckpoint(file, config.num_hidden_layers, head_dim, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.take(name, parameter.shape))
    checkpoint.check_all_taken()
    return model
