"""Small random checkpoints, saved by Transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 307
LLAMA_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT_SIZES = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 96,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXTS = [random.Random(length).choices(range(VOCAB), k=length) for length in (43, 18, 5)]


def save_random(config_name: str, options: dict[str, Any], directory: Path) -> Any:
    """Saves a random model; also norms and biases, which Transformers starts at 1 and 0, are random."""
    torch.manual_seed(1)
    config = getattr(transformers, config_name)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def their_logits(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0] for text in TEXTS]
