"""Small random targets, each with an assistant that agrees with it now and then: its own weights, disturbed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB = 96
END = 1


@dataclass(frozen=True, slots=True)
class Models:
    """float64, so that what a pass over several tokens rounds otherwise decides nothing."""

    target: Any
    assistant: Any
    inputs: torch.Tensor
    """[1, …] of the target's first argument."""


def llama(seed: int = 1, vocab: int = VOCAB, noise: float = 0.08) -> Models:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=END,  # another one, once drawn, would be taken for padding by Transformers' assistant
    )
    return _models(LlamaForCausalLM(config), _tokens(14, seed, vocab), seed, noise)


def t5(seed: int = 1) -> Models:
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    return _models(T5ForConditionalGeneration(config), _tokens(12, seed, VOCAB), seed, 0.05, 4.0)


def whisper(seed: int = 2) -> Models:
    config = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=20,
        max_target_positions=64,
        decoder_start_token_id=2,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=END,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    features = torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return _models(WhisperForConditionalGeneration(config), features, seed, 0.1)


def _models(model: Any, inputs: torch.Tensor, seed: int, noise: float, scale: float = 1.5) -> Models:
    target = _randomised(model.double().eval(), seed, scale)
    return Models(target, disturbed(target, noise, seed + 1), inputs)


def _tokens(count: int, seed: int, vocab: int) -> torch.Tensor:
    return torch.randint(2, vocab, (1, count), generator=torch.Generator().manual_seed(seed))


def _randomised(model: Any, seed: int, scale: float) -> Any:
    """Weights large enough for attention to matter and for text to vary."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.ndim == 1:
                parameter.add_(values * 0.1)
            elif any(part in name for part in ("embed", "shared", "head", "proj_out")):
                parameter.copy_(values)
            else:
                parameter.copy_(values * (scale / parameter.shape[-1] ** 0.5))
    return model


def disturbed(model: Any, noise: float, seed: int) -> Any:
    """A copy with ``noise`` times each weight's spread added."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(values * parameter.std() * noise)
    return other
