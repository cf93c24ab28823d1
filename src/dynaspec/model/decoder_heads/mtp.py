"""Prediction layers (MTP): a decoder layer of a target's own kind that was trained with it to predict one token more.

MiMo's lies in its target's checkpoint; ``speculators`` writes one to a checkpoint of its own. The two order the halves
of the projection's input differently, under the same names. DeepSeek's, GLM's and Qwen3-Next's are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Model
from dynaspec.model.families.common import UnsupportedVariantError
from dynaspec.model.families.llama import layer
from dynaspec.model.families.qwen import qwen2_config, qwen3_config
from dynaspec.model.head_tensors import decoder_head_tensors
from dynaspec.model.linear import Quantization
from dynaspec.model.reader import Reader
from dynaspec.model.weights import PREDICTION_LAYERS, find_checkpoint, read_json

from .config import HeadConfig, check_target
from .head import Head, HeadWeights

_EXPECTED = "expected a MiMoForCausalLM, or a checkpoint of `speculators` for 'mtp' with a dense 'qwen3' layer"
_PREFIX = "mtp_layers.0"


class _Layout(NamedTuple):
    """What depends on the library that wrote a checkpoint."""

    decoder: DecoderConfig
    under: str
    """See ``decoder_head_tensors``."""
    mimo: bool


def load_mtp(
    path_or_id: str, target: Model, *, revision: str | None = None, quantization: Quantization | None = None
) -> Head:
    """Loads a prediction layer in the target's dtype, on its device.

    Args:
        path_or_id: a directory or a repository of the Hugging Face hub; it may be the target's own.
        target: whose hidden states it reads, and whose embedding and output layer it uses.
        quantization: see ``load_model``; of the head's own matrices.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, corrupt, made for another target, or of another kind.
    """
    directory = find_checkpoint(path_or_id, revision)
    if directory.is_file():
        raise CheckpointError(f"{directory} is a GGUF file, of which no prediction layers are read; {_EXPECTED}")
    path = directory / "config.json"
    layout = _read_layout(path, read_json(path))
    decoder = layout.decoder
    config = HeadConfig(
        decoder,
        draft_vocab=decoder.vocab_size,
        target_hidden=decoder.hidden_size,
        states=(target.config.num_layers + 1,),
        hidden_first=layout.mimo,
        zero_first=layout.mimo,
        norm_output=True,
    )
    check_target(path, config, target)
    tensors = decoder_head_tensors(directory, layout.under)
    reader = Reader(tensors, decoder, target.device, target.dtype, quantization, target.product_dtype)
    width = decoder.hidden_size
    weights = HeadWeights(
        embedding=target.embedding,
        layers=(layer(reader, decoder, _PREFIX, 0),),
        head=target.head,
        hidden_norm=reader.norm(f"{_PREFIX}.hidden_layernorm"),
        embedding_norm=reader.norm(f"{_PREFIX}.token_layernorm"),
        projection=reader.linear([f"{_PREFIX}.input_proj"], [width], 2 * width),
        final_norm=reader.norm(f"{_PREFIX}.final_layernorm"),
    )
    tensors.check_all_taken()
    return Head(config, weights, target)


def _read_layout(path: Path, raw: Mapping[str, Any]) -> _Layout:
    """
    Args:
        path: of config.json, for messages.
        raw: its content.
    """
    names = raw.get("architectures") or [raw.get("model_type", "unknown")]
    inner = raw.get("transformer_layer_config")
    if inner is not None and raw.get("speculators_model_type", "mtp") == "mtp":
        if inner.get("model_type") != "qwen3":
            found = inner.get("model_type")
            raise CheckpointError(f"{path}: transformer_layer_config.model_type is {found!r}; {_EXPECTED}")
        layout = _Layout(_decoder(path, inner, "qwen3"), "", mimo=False)
    elif "MiMoForCausalLM" in names:
        layout = _Layout(_decoder(path, raw, "qwen2"), PREDICTION_LAYERS, mimo=True)
    else:
        raise CheckpointError(f"{path}: method is 'mtp' but the checkpoint is a {names[0]}; {_EXPECTED}")
    layers = raw.get("num_nextn_predict_layers", 1)
    if layers != 1:
        raise CheckpointError(
            f"{path}: num_nextn_predict_layers is {layers!r}; expected 1, as one layer drafts all tokens here"
        )
    return layout


def _decoder(path: Path, keys: Mapping[str, Any], family: Literal["qwen2", "qwen3"]) -> DecoderConfig:
    """One layer of a family; ``keys`` of its config may be left out where they have its defaults."""
    from transformers import AutoConfig

    known = {key: value for key, value in keys.items() if key not in ("architectures", "model_type", "auto_map")}
    try:
        hf = AutoConfig.for_model(family, **known)
        whole = qwen3_config(hf, None) if family == "qwen3" else qwen2_config(hf, None)
    except (UnsupportedVariantError, ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the head's decoder cannot be built: {error}") from error
    return replace(whole, num_layers=1, windows=whole.windows[:1])
