"""Small random checkpoints, made when a test session starts: a target, and a drafter that often agrees with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 320
EOS = 0
MAX_POSITION = 256
CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the dog chases the fox",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "1 2 3 4 5 6 7 8 9 10, one two three four five six seven eight nine ten",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": False,
    "pad_token_id": EOS,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
}
_NO_HEAD_DIM = {name: value for name, value in _LLAMA.items() if name != "head_dim"}
_GPT = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_POSITION,
    "tie_word_embeddings": False,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "mistral": ("MistralConfig", _LLAMA | {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", _NO_HEAD_DIM),
    "qwen3": ("Qwen3Config", _LLAMA),
    "gemma2": ("Gemma2Config", _LLAMA | {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        _LLAMA
        | {
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("Phi3Config", _NO_HEAD_DIM | {"sliding_window": 24}),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "word_embed_proj_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "ffn_dim": 96,
            "max_position_embeddings": MAX_POSITION,
            "tie_word_embeddings": False,
            "pad_token_id": EOS,
            "bos_token_id": EOS,
            "eos_token_id": EOS,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {name: value for name, value in _NO_HEAD_DIM.items() if name != "num_key_value_heads"}
        | {"hidden_size": 64, "rotary_pct": 0.25},
    ),
    "gpt2": ("GPT2Config", _GPT),
    "gptj": ("GPTJConfig", _GPT | {"rotary_dim": 8}),
    "codegen": ("CodeGenConfig", _GPT | {"n_embd": 64, "rotary_dim": 8}),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Checkpoint folders of a target and of its drafter."""

    target: str
    drafter: str


def save_pair(folder: Path, family: str = "llama", *, noise: float = 0.08, seed: int = 1) -> Pair:
    """A random target, and a drafter whose weights are the target's plus ``noise`` times their spread."""
    target, drafter = folder / "target", folder / "drafter"
    config_name, options = FAMILIES[family]
    model = random_model(config_name, options, seed)
    save(model, target)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread * noise)
    save(model, drafter)
    return Pair(str(target), str(drafter))


def random_model(config_name: str, options: dict[str, Any], seed: int) -> Any:
    """Weights large enough for attention to matter, and logits peaked enough for text to vary."""
    config = getattr(transformers, config_name)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:  # norms and biases, which start at 1 and 0
                parameter.add_(values * 0.1)
            elif "head" in name or "embed_out" in name:
                parameter.copy_(values * 0.6)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(values)
            else:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
    return model


def save(model: Any, folder: Path) -> None:
    """Weights, config and tokenizer, as a Hugging Face checkpoint."""
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of ``VOCAB`` tokens with a chat template; token ``EOS`` is its only special one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken("<|end|>", special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens; expected {VOCAB}")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|end|>",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
