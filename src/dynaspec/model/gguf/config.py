"""A GGUF file's keys under the names of Transformers' config of the same model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dynaspec.contract.errors import CheckpointError

from .checkpoint import ARCHITECTURES, LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from .file import GgufFile

_MODELS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
"""Transformers' model type and class."""
_ENDS_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Tokens that end an answer wherever they exist: files name one end of text, and chats often end with another."""
_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
_LONGEST_CONTEXT = 1 << 24
"""More than any model has, and few enough for tables by position."""
_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models that scale attention by hidden size over heads, which no key says."""


def config_of(file: GgufFile) -> SimpleNamespace:
    """Everything that model families read from a Transformers config, without importing Transformers, which takes
    seconds; ``gguf.transformers`` builds Transformers' own config from it.

    Raises:
        CheckpointError: an unknown architecture, or keys that are missing or make no sense.
    """
    if file.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} has the architecture {file.architecture!r}; expected one of {', '.join(ARCHITECTURES)}"
        )
    kind, name = _MODELS[file.architecture]
    return SimpleNamespace(model_type=kind, architectures=[name], dtype=_dtype(file), **_Fields(file).all())


def _dtype(file: GgufFile) -> torch.dtype:
    """The dtype that comes closest to what is stored."""
    stored = {tensor.dtype or torch.bfloat16 for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in stored), torch.float32)


class _Fields:
    """Reads the keys of one file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = file.architecture
        self._layers = self._count("block_count")
        self._hidden = self._count("embedding_length")
        self._heads = self._count("attention.head_count")
        self._head_dim = self._optional("attention.key_length", int) or self._hidden // self._heads
        self._kv_heads = self._optional("attention.head_count_kv", int) or self._heads
        self._context = self._count("context_length")

    def all(self) -> dict[str, Any]:
        self._check()
        fields = self._shape() | self._tokens()
        if self._architecture.startswith("gemma"):
            return fields | self._gemma()
        if self._architecture == "phi3":
            return fields | self._phi3()
        bias = self._has("blk.0.attn_q.bias")
        fields |= {"hidden_act": "silu", "rope_parameters": self._rope()}
        if self._architecture == "llama":
            fields |= {"attention_bias": bias, "mlp_bias": self._has("blk.0.ffn_up.bias")}
        if self._architecture == "qwen3":
            fields |= {"attention_bias": bias}
        return fields

    def _check(self) -> None:
        """Raises CheckpointError for what no model of these families can have."""
        if (experts := self._optional("expert_count", int) or 0) > 0:
            raise CheckpointError(f"{self._file.path} has {experts} experts a layer; expected a dense model")
        values = self._optional("attention.value_length", int)
        if values not in (None, self._head_dim):
            raise CheckpointError(
                f"{self._file.path} has values of {values} dimensions and keys of {self._head_dim}; expected the same"
            )
        if self._head_dim % 2 or self._heads % self._kv_heads:
            raise CheckpointError(
                f"{self._file.path} has {self._heads} heads of {self._head_dim} dimensions and {self._kv_heads} KV "
                "heads; expected an even number of dimensions and a multiple of the KV heads"
            )
        if self._context > _LONGEST_CONTEXT:
            raise CheckpointError(
                f"{self._file.path} has {self._context} for {self._key('context_length')}; expected at most "
                f"{_LONGEST_CONTEXT}"
            )
        if self._layers > len(self._file.tensors):
            raise CheckpointError(
                f"{self._file.path} has {self._layers} layers by its keys and {len(self._file.tensors)} tensors; "
                "expected several tensors a layer"
            )

    def _shape(self) -> dict[str, Any]:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(
                f"{self._file.path} lacks the tensor token_embd.weight, of shape [vocabulary, {self._hidden}]"
            )
        return {
            "vocab_size": embedding.shape[0],
            "hidden_size": self._hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._layers,
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim,
            "max_position_embeddings": self._context,
            "rms_norm_eps": self._file.need(self._key("attention.layer_norm_rms_epsilon"), float),
            "tie_word_embeddings": not self._has("output.weight"),
        }

    def _tokens(self) -> dict[str, Any]:
        """Special tokens, as far as the file has them."""
        get = self._file.get
        ends = [get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
        texts = self._file.items("tokenizer.ggml.tokens", str) or []
        kinds = self._file.items("tokenizer.ggml.token_type", int) or []
        ends += [
            token
            for token, (text, kind) in enumerate(zip(texts, kinds, strict=False))
            if kind in (_CONTROL, _USER_DEFINED) and text in _ENDS_OF_TURN
        ]
        return {
            "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)) or None,
            "bos_token_id": get("tokenizer.ggml.bos_token_id", int),
            "pad_token_id": get("tokenizer.ggml.padding_token_id", int),
        }

    def _gemma(self) -> dict[str, Any]:
        largest = self._layers == _LARGEST_GEMMAS[self._architecture]
        scale = self._optional("attention.scale", float)
        fields: dict[str, Any] = {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": self._hidden // self._heads if largest else self._head_dim,
            "attention_bias": self._has("blk.0.attn_q.bias"),
        }
        if scale is not None:
            fields["query_pre_attn_scalar"] = round(scale**-2)
        window = self._optional("attention.sliding_window", int)
        final = self._optional("final_logit_softcapping", float)
        if self._architecture == "gemma2":
            return fields | {
                "layer_types": self._layer_types(2),
                "sliding_window": window or 4096,
                "attn_logit_softcapping": self._optional("attn_logit_softcapping", float) or 50.0,
                "final_logit_softcapping": final or 30.0,
                "rope_parameters": self._rope(),
            }
        local = {"rope_type": "default", "rope_theta": self._optional("rope.freq_base_swa", float) or 10000.0}
        return fields | {
            "use_bidirectional_attention": False,
            "attn_logit_softcapping": None,
            "layer_types": self._layer_types(6) if window else ["full_attention"] * self._layers,
            "sliding_window": window or None,
            "final_logit_softcapping": final,
            "rope_parameters": {"full_attention": self._rope(), "sliding_attention": local},
        }

    def _layer_types(self, period: int) -> list[str]:
        """Every ``period``-th layer has full attention, unless the file says otherwise."""
        key = self._key("attention.sliding_window_pattern")
        if self._file.is_list(key):
            sliding = self._file.items(key, bool) or []
            if len(sliding) != self._layers:
                raise CheckpointError(
                    f"{self._file.path} has {len(sliding)} values for {key}; expected one for each of "
                    f"{self._layers} layers"
                )
        else:
            period = self._optional("attention.sliding_window_pattern", int) or period
            sliding = [(index + 1) % period != 0 for index in range(self._layers)]
        return ["sliding_attention" if slides else "full_attention" for slides in sliding]

    def _phi3(self) -> dict[str, Any]:
        window = self._optional("attention.sliding_window", int)
        original = self._optional("rope.scaling.original_context_length", int) or self._context
        rope = self._rope()
        rotated = self._optional("rope.dimension_count", int) or self._head_dim
        if self._has(LONG_FACTORS):
            rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
            rope |= {"long_factor": self._factors(LONG_FACTORS), "short_factor": self._factors(SHORT_FACTORS)}
            factor = self._optional("rope.scaling.attn_factor", float)
            rope |= {} if factor is None else {"attention_factor": factor}
        return {
            "hidden_act": "silu",
            # without end: windows as long as the context
            "sliding_window": window if window and window < self._context else None,
            "original_max_position_embeddings": original,
            "rope_parameters": rope | {"partial_rotary_factor": rotated / self._head_dim},
        }

    def _rope(self) -> dict[str, Any]:
        """Rotary settings of layers with full attention."""
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self._optional("rope.freq_base", float) or 10000.0,
        }
        rotated = self._optional("rope.dimension_count", int)
        if rotated not in (None, self._head_dim) and self._architecture != "phi3":
            raise CheckpointError(
                f"{self._file.path} rotates {rotated} of {self._head_dim} dimensions of a head; expected all of them"
            )
        if self._has(ROPE_FACTORS):  # Llama 3's scaling, worked out; factors are what LongRoPE has, too
            factors = self._factors(ROPE_FACTORS)
            context = {"original_max_position_embeddings": self._context, "attention_factor": 1.0}
            return rope | {"rope_type": "longrope", "long_factor": factors, "short_factor": factors} | context
        kind = self._file.get(self._key("rope.scaling.type"), str) or "linear"
        factor = self._optional("rope.scaling.factor", float) or self._optional("rope.scale_linear", float) or 1.0
        if kind in ("none", "longrope") or (kind == "linear" and factor == 1.0):
            return rope
        rope |= {"rope_type": kind, "factor": factor}
        original = self._optional("rope.scaling.original_context_length", int)
        return rope if original is None else rope | {"original_max_position_embeddings": original}

    def _factors(self, name: str) -> list[float]:
        """What each frequency is divided by."""
        tensor = self._file.tensors.get(name)
        if tensor is None or tensor.dtype != torch.float32:
            raise CheckpointError(f"{self._file.path} has no {name} in F32; expected the rotation's factors")
        factors: list[float] = self._file.numbers(tensor, torch.float32).flatten().tolist()
        if not all(np.isfinite(factors)) or min(factors) <= 0:
            raise CheckpointError(f"{self._file.path} has factors in {name} that are not above 0; expected such")
        return factors

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def _count(self, name: str) -> int:
        value = self._file.need(self._key(name), int)
        if value < 1:
            raise CheckpointError(f"{self._file.path} has {value} for {self._key(name)}; expected at least 1")
        return value

    def _optional(self, name: str, kind: type[Any]) -> Any:
        """A number above 0; None if the file lacks it or has 0, which means the same."""
        value = self._file.get(self._key(name), kind)
        if value is not None and value < 0:
            raise CheckpointError(f"{self._file.path} has {value} for {self._key(name)}; expected no less than 0")
        return value or None

    def _has(self, tensor: str) -> bool:
        return tensor in self._file.tensors
