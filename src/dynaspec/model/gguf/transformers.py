"""A GGUF file as a model of Transformers, for what needs its modules: training, and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dynaspec.contract.errors import CheckpointError

from .checkpoint import GgufCheckpoint
from .config import config_of
from .file import GgufFile


def transformers_config(path: Path) -> Any:
    """Transformers' config.

    Raises:
        CheckpointError: the file cannot be read, is of an unknown architecture, or has keys that Transformers refuses.
    """
    return _config(GgufFile(path))


def _config(file: GgufFile) -> Any:
    fields = vars(config_of(file))
    from transformers import AutoConfig  # here, because it takes seconds to import

    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:  # Transformers' validation raises nearly anything
        kind = fields["model_type"]
        raise CheckpointError(f"{file.path} has keys that make no {kind} config in Transformers: {error}") from error


def transformers_model(path: Path, dtype: torch.dtype) -> Any:
    """Transformers' causal language model, its weights in ``dtype``.

    Raises:
        CheckpointError: the file cannot be read, is of an unknown architecture, or lacks a tensor.
    """
    from transformers import AutoModelForCausalLM  # here, because it takes seconds to import

    file = GgufFile(path)
    config = _config(file)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    checkpoint = GgufCheckpoint(file, config.num_hidden_layers, head_dim, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.take(name, parameter.shape))
    checkpoint.check_all_taken()
    return model
