"""EAGLE-1 and EAGLE-2 heads (Li et al., 2401.15077, 2406.16858), whose files are alike.

A linear layer over embedding and hidden state, and decoder layers of which the first has no norm before its attention.
What comes out is the target's next hidden state behind its final norm, as the head predicts it: so the target's output
layer makes the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Layer, Model
from dynaspec.model.families.llama import projections
from dynaspec.model.head_tensors import PICKLED, decoder_head_tensors
from dynaspec.model.linear import Quantization
from dynaspec.model.reader import Reader
from dynaspec.model.weights import find_checkpoint, read_json

from .config import HeadConfig, check_target, llama_decoder
from .head import Head, HeadWeights

_VLLMS = "EagleLlamaForCausalLM"
"""The architecture that heads converted for vLLM name."""


def load_eagle(
    path_or_id: str, target: Model, *, revision: str | None = None, quantization: Quantization | None = None
) -> Head:
    """See ``load_head``: a head of EAGLE-1 or EAGLE-2."""
    directory = find_checkpoint(path_or_id, revision, [PICKLED])
    path = directory / "config.json"
    raw = read_json(path)
    if "transformer_layer_config" in raw:
        raise CheckpointError(
            f"{path}: EAGLE heads of `speculators` are not read; expected the authors' or vLLM's format"
        )
    decoder = llama_decoder(path, raw, qkv_bias=bool(raw.get("qkv_bias", False)))
    config = HeadConfig(decoder, decoder.vocab_size, decoder.hidden_size, (target.config.num_layers + 1,))
    check_target(path, config, target)
    tensors = decoder_head_tensors(directory)
    tensors.ignore(["embed_tokens.weight"])  # a copy of the target's
    reader = Reader(tensors, decoder, target.device, target.dtype, quantization, target.product_dtype)
    width = decoder.hidden_size
    weights = HeadWeights(
        embedding=target.embedding,
        layers=tuple(_layer(reader, decoder, index) for index in range(decoder.num_layers)),
        head=target.head,
        hidden_norm=reader.optional_norm("hidden_states_layernorm"),
        embedding_norm=reader.optional_norm("embedding_layernorm"),
        projection=reader.linear(["fc"], [width], 2 * width, _has_bias(raw)),
    )
    tensors.check_all_taken()
    return Head(config, weights, target)


def _layer(reader: Reader, decoder: DecoderConfig, index: int) -> Layer:
    prefix = f"layers.{index}"
    return Layer(
        attention_norm=reader.norm(f"{prefix}.input_layernorm") if index else None,
        mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm"),
        window=None,
        **projections(reader, decoder, prefix),
    )


def _has_bias(raw: Mapping[str, Any]) -> bool:
    """Whether the projection has one: by default in the authors' heads, in vLLM's only if ``eagle_fc_bias`` says so."""
    if _VLLMS in (raw.get("architectures") or ()):
        return bool(raw.get("eagle_fc_bias", raw.get("bias", False)))
    return bool(raw.get("bias", True))
