"""What a head looks like: its sizes, the tokens that it drafts, and a head to train on from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.model.decoder_heads.eagle3 import read_config
from dynaspec.model.head_tensors import decoder_head_tensors
from dynaspec.model.weights import find_checkpoint, read_json


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head, whose decoder layer is the target's own.

    ``aux_layers`` are the hidden states that it reads: k names the residual stream that enters the target's layer k;
    one more than there are layers, the state after the final norm. ``norm_before_residual`` is EAGLE-3's.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    aux_layers: tuple[int, ...]
    rope_theta: float = 10000.0
    eps: float = 1e-5
    positions: int = 2048
    norm_before_residual: bool = True

    def __post_init__(self) -> None:
        if self.draft_vocab > self.vocab:
            raise ConfigError(f"draft_vocab: got {self.draft_vocab}, expected at most the target's {self.vocab}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads: got {self.heads} over {self.kv_heads} KV heads, expected a multiple")

    @property
    def aux_width(self) -> int:
        """Width of the hidden states that the head is fed with."""
        return len(self.aux_layers) * self.hidden

    def as_facts(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "aux_layers": list(self.aux_layers)}


def aux_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose input EAGLE-3 taps: an early one, the middle, a late one.

    Raises:
        ConfigError: the target is too shallow.
    """
    if layers < 4:
        raise ConfigError(f"target: got {layers} layers, expected at least 4 to take hidden states from")
    return (2, layers // 2, layers - 3) if layers > 6 else (1, layers // 2, layers - 1)


def shape_for(
    config: Mapping[str, Any],
    draft_vocab: int,
    layers: tuple[int, ...] | None = None,
    norm_before_residual: bool = True,
) -> HeadShape:
    """The head for a target with Hugging Face's ``config`` (its ``to_dict()``); layer sizes are the target's own.

    Without ``layers``, it reads the state after the final norm.

    Raises:
        ConfigError: the configuration lacks a size.
    """
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
        return HeadShape(
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            draft_vocab=draft_vocab,
            aux_layers=(int(config["num_hidden_layers"]) + 1,) if layers is None else layers,
            rope_theta=float(theta),
            eps=float(config.get("rms_norm_eps") or 1e-5),
            positions=int(config.get("max_position_embeddings") or 2048),
            norm_before_residual=norm_before_residual,
        )
    except KeyError as error:
        raise ConfigError(f"target: got a config.json without {error}, expected a decoder's sizes") from error


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """``ids`` [draft_vocab] int64, ascending: the target's id of every draft id; ``size`` is the target's."""

    ids: Tensor
    size: int

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or not len(self.ids) or bool((self.ids.diff() <= 0).any()):
            raise ConfigError("draft vocabulary: got ids that do not ascend, expected every id once, in order")
        if int(self.ids[0]) < 0 or int(self.ids[-1]) >= self.size:
            raise ConfigError(f"draft vocabulary: got an id outside 0 … {self.size - 1}, expected the target's ids")

    @property
    def d2t(self) -> Tensor:
        """[draft_vocab] int64 offsets: target id = draft id + offset, as EAGLE-3 checkpoints store them."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """[vocab] bool: whether the target's id can be drafted."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[self.ids] = True
        return mask


def most_frequent(texts: Iterable[Tensor], vocab: int, draft_vocab: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """The ``draft_vocab`` most frequent ids of ``texts`` (int tensors), ``always`` among them.

    Ids that never occur fill up what is left, lowest first: merges are numbered by frequency.

    Raises:
        ConfigError: ``draft_vocab`` does not fit the target's ``vocab``.
    """
    if not 0 < draft_vocab <= vocab:
        raise ConfigError(f"draft_vocab: got {draft_vocab}, expected 1 … {vocab}, the target's vocabulary")
    counts = torch.zeros(vocab, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text.long(), minlength=vocab)
    for token in always:
        counts[token] = torch.iinfo(torch.int64).max
    order = torch.sort(counts, descending=True, stable=True).indices
    return DraftVocabulary(order[:draft_vocab].sort().values, vocab)


def coverage(texts: Iterable[Tensor], vocabulary: DraftVocabulary) -> float:
    """Share of the tokens of ``texts`` that can be drafted; NaN without any."""
    mask = vocabulary.t2d
    inside = total = 0
    for text in texts:
        inside += int(mask[text.long()].sum())
        total += len(text)
    return inside / total if total else float("nan")


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
