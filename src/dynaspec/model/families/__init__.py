"""The model families that the decoder runs. A file for each, or for several that differ little, maps a Hugging Face
config to ``DecoderConfig`` and names of weights to parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Weights
from dynaspec.model.reader import Reader

from . import gemma, gpt2, gpt_neox, gptj, llama, opt, phi3, qwen


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of an architecture are read."""

    config: Callable[[Any, int | None], DecoderConfig]
    """From a Transformers config and ``max_model_len``, see ``load_model``. Raises ``UnsupportedVariantError`` for what
    the family could be but the decoder cannot do."""
    weights: Callable[[Reader, DecoderConfig], Weights]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama.config, llama.weights),
    "MistralForCausalLM": Family(llama.config, llama.weights),
    "Qwen2ForCausalLM": Family(qwen.qwen2_config, llama.weights),
    "MiMoForCausalLM": Family(qwen.qwen2_config, llama.weights),
    "Qwen3ForCausalLM": Family(qwen.qwen3_config, llama.weights),
    "Gemma2ForCausalLM": Family(gemma.gemma2_config, gemma.weights),
    "Gemma3ForCausalLM": Family(gemma.gemma3_config, gemma.weights),
    "Phi3ForCausalLM": Family(phi3.config, phi3.weights),
    "OPTForCausalLM": Family(opt.config, opt.weights),
    "GPTNeoXForCausalLM": Family(gpt_neox.config, gpt_neox.weights),
    "GPT2LMHeadModel": Family(gpt2.config, gpt2.weights),
    "GPTJForCausalLM": Family(gptj.config, gptj.gptj_weights),
    "CodeGenForCausalLM": Family(gptj.config, gptj.codegen_weights),
}
"""By architecture name."""
