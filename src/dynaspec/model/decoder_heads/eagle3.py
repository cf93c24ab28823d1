"""EAGLE-3 heads (Li et al., 2503.01840), in any of the layouts they are published in.

Originals (SafeAILab/EAGLE), SGLang, NVIDIA ModelOpt and AngelSlim write one flat config; ``speculators`` puts the
decoder's part into ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Layer, Model
from dynaspec.model.families.llama import projections
from dynaspec.model.head_tensors import PICKLED, HeadTensors, decoder_head_tensors
from dynaspec.model.linear import Linear, Quantization
from dynaspec.model.quantised_checkpoints import check_not_quantised, is_plain
from dynaspec.model.reader import Reader
from dynaspec.model.weights import find_checkpoint, read_json

from .config import HeadConfig, check_target, llama_decoder
from .head import Head, HeadWeights

_FIXED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Options of ModelOpt's ``eagle_config`` that have one value in every head seen; others are refused."""


def load_eagle3(
    path_or_id: str, target: Model, *, revision: str | None = None, quantization: Quantization | None = None
) -> Head:
    """See ``load_head``: a head of EAGLE-3."""
    directory = find_checkpoint(path_or_id, revision, [PICKLED])
    path = directory / "config.json"
    raw = read_json(path)
    config = read_config(path, raw, target.config.num_layers)
    tensors = decoder_head_tensors(directory)
    if not all(is_plain(tensors.tensor(name)) for name in tensors.names if ".weight" in name):
        check_not_quantised(directory, raw)  # by itself that may be the target's, whose config has been copied
    check_target(path, config, target)
    config = replace(config, decoder=replace(config.decoder, qk_norm="layers.0.self_attn.q_norm.weight" in tensors))
    weights = _read_weights(tensors, config, target, quantization)
    tensors.check_all_taken()
    return Head(config, weights, target)


def read_config(path: Path, raw: Mapping[str, Any], layers: int) -> HeadConfig:
    """
    Args:
        path: of the file, for messages.
        raw: its JSON.
        layers: of the target.

    Raises:
        CheckpointError: something is missing, contradictory, or not supported.
    """
    inner = raw.get("transformer_layer_config") or raw
    decoder = llama_decoder(path, inner, qkv_bias=bool(inner.get("attention_bias", False)))
    own = raw.get("eagle_config") or {}
    for key, only in _FIXED.items():
        if own.get(key, only) != only:
            raise CheckpointError(f"{path}: eagle_config.{key} is {own[key]!r}; expected {only!r}")
    fused = bool(own.get("use_aux_hidden_state", True))
    return HeadConfig(
        decoder,
        draft_vocab=raw.get("draft_vocab_size") or decoder.vocab_size,
        target_hidden=raw.get("target_hidden_size") or decoder.hidden_size,
        states=_states(path, raw, own, layers) if fused else (layers + 1,),
        fused=fused,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_output=bool(raw.get("norm_output", False)),
    )


def _states(path: Path, raw: Mapping[str, Any], own: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layer numbers mean a layer's input at the top level (vLLM, speculators), else its output (SGLang, ModelOpt)."""
    inputs: Sequence[int] | None = raw.get("eagle_aux_hidden_state_layer_ids")
    outputs: Sequence[int] | None = own.get("eagle_aux_hidden_state_layer_ids") or raw.get("target_layer_ids")
    if inputs is not None:
        states = tuple(int(layer) for layer in inputs)
    elif outputs is not None:
        states = tuple(int(layer) + 1 for layer in outputs)
    else:
        states = (2, layers // 2, layers - 3)
    if not states or min(states) < 0 or max(states) > layers or len(set(states)) < len(states):
        raise CheckpointError(
            f"{path}: the head reads the target's hidden states {list(states)}, but the target has {layers} layers; "
            f"expected different ones from 0 to {layers}"
        )
    return states


def _read_weights(
    tensors: HeadTensors, config: HeadConfig, target: Model, quantization: Quantization | None
) -> HeadWeights:
    decoder = config.decoder
    reader = Reader(tensors, decoder, target.device, target.dtype, quantization, target.product_dtype)
    hidden, states = decoder.hidden_size, len(config.states)
    layers = tuple(_layer(reader, tensors, decoder, index) for index in range(decoder.num_layers))
    return HeadWeights(
        embedding=_embedding(reader, tensors, config, target),
        embedding_norm=reader.norm("layers.0.input_layernorm"),
        fusion=_linear(reader, tensors, "fc", hidden, states * config.target_hidden) if config.fused else None,
        state_norms=tuple(
            reader.norm(f"fc_norm.{i}", config.target_hidden) for i in range(states) if f"fc_norm.{i}.weight" in tensors
        ),
        input_norm=reader.optional_norm("input_norm", states * config.target_hidden),
        hidden_norm=reader.norm("layers.0.hidden_norm"),
        layers=layers,
        final_norm=reader.norm("norm"),
        head=_head(reader, tensors, config, target),
        vocabulary=_vocabulary(tensors, config),
    )


def _layer(reader: Reader, tensors: HeadTensors, decoder: DecoderConfig, index: int) -> Layer:
    """The first reads the normed embedding and hidden state side by side."""
    prefix = f"layers.{index}"
    attention = f"{prefix}.input_layernorm"
    if index and f"{attention}.weight" not in tensors:
        attention = f"{prefix}.hidden_norm"  # SGLang's name for it in further layers
    width = decoder.hidden_size * (2 if index == 0 else 1)
    return Layer(
        attention_norm=reader.norm(attention) if index else None,
        mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm"),
        window=None,
        **projections(reader, decoder, prefix, width),
    )


def _linear(reader: Reader, tensors: HeadTensors, name: str, out: int, width: int) -> Linear:
    return reader.linear([name], [out], width, f"{name}.bias" in tensors)


def _embedding(reader: Reader, tensors: HeadTensors, config: HeadConfig, target: Model) -> torch.Tensor:
    decoder = config.decoder
    if "embed_tokens.weight" in tensors:
        return reader.tensor("embed_tokens.weight", decoder.vocab_size, decoder.hidden_size)
    if decoder.hidden_size != target.config.hidden_size:
        raise CheckpointError(
            f"{tensors.where} lacks the tensor embed_tokens.weight, of shape "
            f"{[decoder.vocab_size, decoder.hidden_size]}: the target's embedding is {target.config.hidden_size} wide"
        )
    return target.embedding


def _head(reader: Reader, tensors: HeadTensors, config: HeadConfig, target: Model) -> Linear:
    width = config.decoder.hidden_size
    if "lm_head.weight" in tensors:
        return reader.linear(["lm_head"], [config.draft_vocab], width)
    if config.draft_vocab != config.decoder.vocab_size or width != target.config.hidden_size:
        raise CheckpointError(
            f"{tensors.where} lacks the tensor lm_head.weight, of shape {[config.draft_vocab, width]}"
        )
    return target.head


def _vocabulary(tensors: HeadTensors, config: HeadConfig) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """[draft vocabulary] the target's id of each drafted one; None where they are the same. ``d2t`` holds offsets."""
    size, most = config.draft_vocab, config.decoder.vocab_size
    tensors.ignore(["t2d"])  # the same the other way round
    if "d2t" not in tensors:
        if size != most:
            raise CheckpointError(f"{tensors.where} lacks the tensor d2t, of shape {[size]}")
        return None
    ids = tensors.take("d2t", [size]).to(torch.int64).numpy() + np.arange(size)
    if ids.min() < 0 or ids.max() >= most or len(np.unique(ids)) < size:
        raise CheckpointError(
            f"{tensors.where}: d2t leads to ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different; "
            f"expected {size} different ones below {most}"
        )
    return ids
