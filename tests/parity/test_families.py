"""Every family against Transformers on a small random checkpoint, and bitwise against itself in other batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynaspec.model.base import Model
from dynaspec.model.loader import load_model

from .paging import in_passes

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 96,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA_SIZES),
    "llama_head_dim_24": ("LlamaConfig", LLAMA_SIZES | {"head_dim": 24, "num_key_value_heads": 1}),
    "llama_bias_tied": (
        "LlamaConfig",
        LLAMA_SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3_rope": ("LlamaConfig", LLAMA_SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (
        "LlamaConfig",
        LLAMA_SIZES | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("MistralConfig", LLAMA_SIZES | {"sliding_window": 9}),
    "qwen2": (
        "Qwen2Config",
        {key: value for key, value in LLAMA_SIZES.items() if key != "head_dim"}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", LLAMA_SIZES | {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        LLAMA_SIZES | {"sliding_window": 9, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    ),
    "phi3": ("Phi3Config", {k: v for k, v in LLAMA_SIZES.items() if k != "head_dim"} | {"sliding_window": 9}),
    "phi3_longrope": (
        "Phi3Config",
        {k: v for k, v in LLAMA_SIZES.items() if k != "head_dim"}
        | {
            "hidden_size": 64,
            "original_max_position_embeddings": 96,
            "max_position_embeddings": 96,
            "rope_parameters": LONG_ROPE,
        },
    ),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "word_embed_proj_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "ffn_dim": 72,
            "max_position_embeddings": 96,
            "init_std": 0.1,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {k: v for k, v in LLAMA_SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
        | {"hidden_size": 64, "rotary_pct": 0.25, "hidden_act": "gelu"},
    ),
    "gpt_neox_sequential": (
        "GPTNeoXConfig",
        {k: v for k, v in LLAMA_SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
        | {"use_parallel_residual": False, "rotary_pct": 1.0},
    ),
    "gpt2": ("GPT2Config", GPT_SIZES),
    "gptj": ("GPTJConfig", GPT_SIZES | {"rotary_dim": 8}),
    "codegen": ("CodeGenConfig", GPT_SIZES | {"n_embd": 64, "rotary_dim": 8}),
}

TEXTS = [random.Random(length).choices(range(VOCAB), k=length) for length in (43, 18, 5)]
RAGGED = [(20, 0, 5), (17, 18, 0), (1, 0, 0), (2, 0, 0), *[(1, 0, 0)] * 3]


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


@pytest.fixture(scope="module", params=CASES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    theirs = save_random(*CASES[request.param], directory)
    return load_model(str(directory)), theirs


def their_logits(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0] for text in TEXTS]


def test_logits_are_those_of_transformers(models: tuple[Model, Any]) -> None:
    ours, theirs = models
    for found, expected in zip(in_passes(ours, TEXTS, RAGGED), their_logits(theirs), strict=True):
        assert expected.abs().max() > 0.5, "logits too flat to tell anything"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rows_are_bitwise_independent_of_batch_and_chunks(models: tuple[Model, Any]) -> None:
    ours, _ = models
    together = in_passes(ours, TEXTS, RAGGED)
    for text, expected in zip(TEXTS, together, strict=True):
        for chunk in (1, 7, len(text)):
            passes = [(chunk,)] * -(-len(text) // chunk)
            (alone,) = in_passes(ours, [text], passes, seed=chunk)
            assert torch.equal(alone, expected), f"chunks of {chunk}"
