"""From a published EAGLE-3 checkpoint to a head on a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.base import Model
from dynaspec.model.families.llama import projections
from dynaspec.model.layer import Layer
from dynaspec.model.linear import Linear
from dynaspec.model.ops import Norm
from dynaspec.model.quantization import Quantization, check_not_quantised, check_quantization, is_plain
from dynaspec.model.reader import Reader
from dynaspec.model.weights import find_checkpoint, read_json

from .config import Eagle3Config, read_config
from .head import Eagle3Head, HeadWeights
from .tensors import HeadTensors


def load_eagle3(
    path_or_id: str, target: Model, *, revision: str | None = None, quantization: Quantization | None = None
) -> Eagle3Head:
    """Loads a head in the target's dtype, on its device.

    Args:
        path_or_id: a directory or a repository of the Hugging Face hub, in any layout of ``docs/eagle3.md``.
        target: whose hidden states it reads; embedding and head are shared where the checkpoint has none.
        quantization: see ``load_model``; of the head's own matrices.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, corrupt, quantised, or made for another target.
        ConfigError: the quantization is not available where the target runs.
    """
    check_quantization(quantization, target.device, target.dtype)
    directory = find_checkpoint(path_or_id, revision)
    path = directory / "config.json"
    raw = read_json(path)
    config = read_config(path, raw, target.config.num_layers)
    tensors = HeadTensors(directory)
    if not all(is_plain(tensor) for name, tensor in tensors.tensors.items() if name.endswith("weight")):
        check_not_quantised(directory, raw)  # by itself that may be the target's, whose config has been copied
    _check_target(path, config, target)
    config = replace(config, decoder=replace(config.decoder, qk_norm="layers.0.self_attn.q_norm.weight" in tensors))
    weights = _read_weights(tensors, config, target, quantization)
    tensors.check_all_taken()
    return Eagle3Head(config, weights, target)


def _check_target(path: Path, config: Eagle3Config, target: Model) -> None:
    given, wanted = target.config, config.decoder
    if config.target_hidden != given.hidden_size:
        raise CheckpointError(
            f"{path}: the head reads hidden states of width {config.target_hidden}, but the target's have "
            f"{given.hidden_size}; expected a head made for this target"
        )
    if wanted.vocab_size != given.vocab_size:
        raise CheckpointError(
            f"{path}: the head's vocabulary has {wanted.vocab_size} tokens, but the target's has {given.vocab_size}; "
            "expected a head made for this target"
        )


def _read_weights(
    tensors: HeadTensors, config: Eagle3Config, target: Model, quantization: Quantization | None
) -> HeadWeights:
    decoder = config.decoder
    reader = Reader(tensors, decoder, target.device, target.dtype, quantization)
    hidden, states = decoder.hidden_size, len(config.states)
    layers = tuple(_layer(reader, tensors, decoder, index) for index in range(decoder.num_layers))
    return HeadWeights(
        embedding=_embedding(reader, tensors, config, target),
        fusion=_linear(reader, tensors, "fc", hidden, states * config.target_hidden) if config.fused else None,
        state_norms=tuple(
            reader.norm(f"fc_norm.{i}", config.target_hidden) for i in range(states) if f"fc_norm.{i}.weight" in tensors
        ),
        input_norm=_optional_norm(reader, tensors, "input_norm", states * config.target_hidden),
        hidden_norm=reader.norm("layers.0.hidden_norm"),
        layers=layers,
        final_norm=reader.norm("norm"),
        head=_head(reader, tensors, config, target),
        vocabulary=_vocabulary(tensors, config),
    )


def _layer(reader: Reader, tensors: HeadTensors, decoder: Any, index: int) -> Layer:
    prefix = f"layers.{index}"
    attention = f"{prefix}.input_layernorm"
    if index and f"{attention}.weight" not in tensors:
        attention = f"{prefix}.hidden_norm"  # SGLang's name for it in further layers
    width = decoder.hidden_size * (2 if index == 0 else 1)
    return Layer(
        attention_norm=reader.norm(attention),
        mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm"),
        window=None,
        **projections(reader, decoder, prefix, width),
    )


def _linear(reader: Reader, tensors: HeadTensors, name: str, out: int, width: int) -> Linear:
    return reader.linear([name], [out], width, f"{name}.bias" in tensors)


def _optional_norm(reader: Reader, tensors: HeadTensors, name: str, width: int) -> Norm | None:
    return reader.norm(name, width) if f"{name}.weight" in tensors else None


def _embedding(reader: Reader, tensors: HeadTensors, config: Eagle3Config, target: Model) -> torch.Tensor:
    decoder = config.decoder
    if "embed_tokens.weight" in tensors:
        return reader.tensor("embed_tokens.weight", decoder.vocab_size, decoder.hidden_size)
    if decoder.hidden_size != target.config.hidden_size:
        raise CheckpointError(
            f"{tensors.directory} lacks the tensor embed_tokens.weight, of shape "
            f"{[decoder.vocab_size, decoder.hidden_size]}: the target's embedding is {target.config.hidden_size} wide"
        )
    return target.embedding


def _head(reader: Reader, tensors: HeadTensors, config: Eagle3Config, target: Model) -> Linear:
    width = config.decoder.hidden_size
    if "lm_head.weight" in tensors:
        return reader.linear(["lm_head"], [config.draft_vocab], width)
    if config.draft_vocab != config.decoder.vocab_size or width != target.config.hidden_size:
        raise CheckpointError(
            f"{tensors.directory} lacks the tensor lm_head.weight, of shape {[config.draft_vocab, width]}"
        )
    return target.head


def _vocabulary(tensors: HeadTensors, config: Eagle3Config) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """[draft vocabulary] the target's id of each drafted one; None where they are the same. ``d2t`` holds offsets."""
    size, most = config.draft_vocab, config.decoder.vocab_size
    tensors.ignore(["t2d"])  # the same the other way round
    if "d2t" not in tensors:
        if size != most:
            raise CheckpointError(f"{tensors.directory} lacks the tensor d2t, of shape {[size]}")
        return None
    ids = tensors.take("d2t", [size]).to(torch.int64).numpy() + np.arange(size)
    if ids.min() < 0 or ids.max() >= most or len(np.unique(ids)) < size:
        raise CheckpointError(
            f"{tensors.directory}: d2t leads to ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different; "
            f"expected {size} different ones below {most}"
        )
    return ids
