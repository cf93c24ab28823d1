"""GGUF files of small random models of Transformers, written with the format's own package.

The files' names of tensors and keys are that package's; what converters change about tensors is done here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VOCAB = 311
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 96,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}
PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_SCALES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
"""Where in a block the scales are, of kinds that the package cannot quantise to."""

Edit = Callable[[gguf.GGUFWriter], None]


def random_model(config_name: str, **options: Any) -> Any:
    """A model of Transformers in float32, all its weights random."""
    torch.manual_seed(2)
    config = getattr(transformers, config_name)(**(SIZES | options))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def quantised(weight: torch.Tensor, kind: Kind) -> tuple[np.ndarray, torch.Tensor]:
    """A matrix [out, in] as stored, [out, bytes], and what it then is, float32: ``weight`` itself where the package can
    quantise, otherwise random numbers of about the same size."""
    values = weight.numpy().astype(np.float32)
    if kind in PLAIN:
        stored = weight.to(PLAIN[kind])
        return stored.view(torch.uint8).numpy(), stored.float()
    if kind not in _SCALES:
        raw = gguf.quants.quantize(values, kind)
        return raw, torch.from_numpy(gguf.quants.dequantize(raw, kind))
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (values.size // block, size), dtype=np.uint8)
    scale = np.float16(1)
    for _ in range(2):  # first to see how large they come out
        for at in _SCALES[kind]:
            raw[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        found = gguf.quants.dequantize(raw, kind)
        scale = np.float16(values.std() / found.std())
    return raw.reshape(len(values), -1), torch.from_numpy(found.reshape(values.shape))


def write(
    path: Path, model: Any, kind: Kind = Kind.Q8_0, *, dtype: torch.dtype = torch.bfloat16, edit: Edit | None = None
) -> Path:
    """Writes a model, its matrices quantised, and gives the model the weights that the file then has.

    Args:
        dtype: what dequantised weights are rounded to.
        edit: adds to the file.
    """
    config = model.config
    architecture = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, config)
    number = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for ours, parameter in model.named_parameters():
        name = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        assert name is not None, ours
        if parameter.ndim == 1:
            stored = parameter.detach().numpy() + (1 if architecture.startswith("gemma") else 0)
            writer.add_tensor(name, stored.astype(np.float32))
            continue
        raw, values = quantised(parameter.detach(), kind)
        parameter.data = values if kind in PLAIN else values.to(dtype).float()
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            raw = by_pairs(raw, config.head_dim)
        writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=kind)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def by_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of query or key heads in the order of a rotation of neighbours."""
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        rope = rope["full_attention"]
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    _write_scaling(writer, config, rope)


def _write_scaling(writer: gguf.GGUFWriter, config: Any, rope: dict[str, Any]) -> None:
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = rope["rope_theta"] ** (-torch.arange(len(scaled)) / len(scaled))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
