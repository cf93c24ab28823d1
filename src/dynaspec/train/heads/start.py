"""An EAGLE-3 head that exists, to train on from instead of from random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.model.decoder_heads.eagle3 import read_config
from dynaspec.model.decoder_heads.tensors import decoder_head_tensors
from dynaspec.model.weights import find_checkpoint, read_json
from dynaspec.train.heads.shape import aux_layers
from dynaspec.train.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class Start:
    """``tensors`` under their names in a checkpoint; ``vocabulary`` is the head's own."""

    path: Path
    tensors: dict[str, Tensor]
    vocabulary: DraftVocabulary
    norm_before_residual: bool


def read_start(path_or_id: str, layers: int, vocab: int) -> Start:
    """The head in a folder or of the hub, for a target with so many ``layers`` and tokens (``vocab``).

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: training makes no heads of its kind.
    """
    folder = find_checkpoint(path_or_id)
    path = folder / "config.json"
    config = read_config(path, read_json(path), layers)
    stored = decoder_head_tensors(folder)
    tensors = {name: stored.tensor(name) for name in stored.names}
    plain = config.decoder.num_layers == 1 and config.fused and not config.norm_output
    if not plain or config.states != aux_layers(layers) or config.decoder.vocab_size != vocab:
        raise ConfigError(
            f"start-from: got a head of {config.decoder.num_layers} layer(s) on the hidden states "
            f"{list(config.states)} of a target with {config.decoder.vocab_size} tokens, expected one layer on "
            f"{list(aux_layers(layers))} and {vocab} tokens"
        )
    offsets = tensors.pop("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
    if offsets.shape != (config.draft_vocab,):
        raise CheckpointError(f"d2t has shape {list(offsets.shape)} in {folder}, expected {[config.draft_vocab]}")
    vocabulary = DraftVocabulary(offsets.long() + torch.arange(config.draft_vocab), vocab)
    if unknown := set(tensors) - _NAMES:
        raise ConfigError(f"start-from: got {sorted(unknown)[0]} in {str(folder)!r}, which training has no place for")
    return Start(folder, tensors, vocabulary, config.norm_before_residual)


_NAMES = {"fc.weight", "norm.weight", "lm_head.weight", "t2d", "embed_tokens.weight"} | {
    f"layers.0.{name}.weight"
    for name in (
        *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}
"""Tensors of a head that training makes; the embedding is the target's own and is left where it is."""
