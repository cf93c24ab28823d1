"""The two models: Llama in the layout that Transformers and this engine load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dynaspec.contract.errors import ConfigError
from dynaspec.train.tokenizer import END_OF_TEXT_ID


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder with tied embeddings and grouped-query attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64
    vocab: int = 4096
    positions: int = 2048
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in (
            "hidden",
            "layers",
            "heads",
            "kv_heads",
            "intermediate",
            "head_dim",
            "vocab",
            "positions",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if not 257 <= self.vocab <= 65_536:  # token files hold 16 bits
            raise ConfigError(f"vocab: got {self.vocab}, expected 257 to 65536")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads: got {self.kv_heads}, expected a divisor of the {self.heads} heads")

    def config(self) -> LlamaConfig:
        """The Transformers configuration of this shape."""
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.positions,
            rms_norm_eps=self.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=None,
        )


TARGET = Shape(hidden=512, layers=8, heads=8, kv_heads=2, intermediate=1408)
DRAFT = Shape(hidden=192, layers=2, heads=3, kv_heads=1, intermediate=512)


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """A fresh model: inner matrices at 1/sqrt(fan in), the two that write the residual stream at 0."""
    torch.manual_seed(seed)
    config = shape.config()
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2 and "embed_tokens" not in name:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def parameters(model: nn.Module) -> int:
    """Number of weights, the tied embedding counted once."""
    return sum(p.numel() for p in model.parameters())
