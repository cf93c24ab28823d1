"""Small checkpoints with random weights, written in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 96
_LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GPT_LIKE = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
KINDS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "mistral": _LLAMA_LIKE | {"sliding_window": 24},
    "qwen2": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE | {"head_dim": 32},
    "gemma2": _LLAMA_LIKE | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
    "phi3": _LLAMA_LIKE | {"pad_token_id": 0},
    "gpt2": _GPT_LIKE,
    "gptj": _GPT_LIKE | {"rotary_dim": 8},
    "gpt_neox": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    "opt": {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
}
"""Model type → what its config sets, beside the vocabulary and the special tokens."""


def write_checkpoint(folder: Path, kind: str = "llama", seed: int = 0, blend: Path | None = None) -> Path:
    """A random model of one kind with a tokenizer of numbered words.

    Args:
        folder: where to; made if it is not there.
        kind: a key of ``KINDS``.
        seed: of the weights.
        blend: a checkpoint of the same kind of which the weights are nine tenths, as a drafter's that often agrees.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind, **KINDS[kind], vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, initializer_range=0.2
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if blend is not None:
        original = AutoModelForCausalLM.from_pretrained(blend, dtype=torch.float32).state_dict()
        model.load_state_dict({name: 0.9 * original[name] + 0.1 * own for name, own in model.state_dict().items()})
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
