"""CodeGen: GPT-J whose queries, values and keys are stored in four shards, as its training wanted them."""

from __future__ import annotations

import torch

from dynaspec.model.config import DecoderConfig
from dynaspec.model.layer import Weights
from dynaspec.model.linear import Linear
from dynaspec.model.reader import Reader

from .gptj import assemble, config, layer

__all__ = ["ARCHITECTURES", "config", "weights"]

ARCHITECTURES = ("CodeGenForCausalLM",)

_SHARDS = 4


def weights(reader: Reader, config: DecoderConfig) -> Weights:
    layers = (
        layer(reader, config, prefix, _qkv(reader, config, f"{prefix}.attn.qkv_proj"))
        for prefix in (f"transformer.h.{index}" for index in range(config.num_layers))
    )
    return assemble(reader, config, tuple(layers))


def _qkv(reader: Reader, config: DecoderConfig, name: str) -> Linear:
    hidden = config.hidden_size
    stored = reader.tensor(f"{name}.weight", 3 * hidden, hidden)
    query, value, key = stored.view(_SHARDS, 3, hidden // _SHARDS, hidden).unbind(1)
    return reader.build(torch.cat([part.reshape(hidden, hidden) for part in (query, key, value)]))
