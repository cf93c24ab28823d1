"""What a run fixes before it trains: shape, draft vocabulary, scale of the states; kept in the work folder.

Kinds of heads that read the same hidden states can share it, and the states with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dynaspec.contract.errors import ConfigError
from dynaspec.train.files import write_atomically, write_text_atomically
from dynaspec.train.heads.conversations import Conversation
from dynaspec.train.heads.shape import HeadShape
from dynaspec.train.heads.target import Target, channel_scale, eos_ids
from dynaspec.train.heads.vocabulary import DraftVocabulary, most_frequent

SCALE_CONVERSATIONS = 64


@dataclass(frozen=True, slots=True)
class Basis:
    """``scale`` is [aux_width] float32; ``embedding`` and ``output`` [vocab, hidden], which may be the same tensor, and
    ``target_norm`` [hidden] are the target's, in its dtype."""

    shape: HeadShape
    vocabulary: DraftVocabulary
    scale: Tensor
    embedding: Tensor
    output: Tensor
    target_norm: Tensor | None

    def cast(self, dtype: torch.dtype) -> Basis:
        """The same with the target's matrices in ``dtype``."""
        embedding = self.embedding.to(dtype)
        output = embedding if self.output is self.embedding else self.output.to(dtype)
        return replace(self, embedding=embedding, output=output)


def choose_vocabulary(
    config: Mapping[str, Any], conversations: Sequence[Conversation], draft_vocab: int
) -> DraftVocabulary:
    """The tokens that the answers of ``conversations`` use most, for a target with Hugging Face's ``config``.

    Raises:
        ConfigError: there are no conversations, or the target's configuration lacks a size.
    """
    if not conversations:
        raise ConfigError("conversations: got none, expected some to take the draft vocabulary from")
    vocab = int(config["vocab_size"])
    answers = (torch.tensor(c.answer) for c in conversations)
    return most_frequent(answers, vocab, min(draft_vocab, vocab), eos_ids(config))


def make_basis(
    target: Target, conversations: Sequence[Conversation], shape: HeadShape, vocabulary: DraftVocabulary
) -> Basis:
    """The scale is that of the states of ``conversations``."""
    some = conversations[:: max(1, len(conversations) // SCALE_CONVERSATIONS)]
    aux = torch.cat([target.hidden(torch.tensor(c.tokens), shape.aux_layers)[0] for c in some])
    embedding = target.embedding.cpu().contiguous()
    tied = target.head.data_ptr() == target.embedding.data_ptr()
    return Basis(
        shape=shape,
        vocabulary=vocabulary,
        scale=channel_scale(aux).cpu(),
        embedding=embedding,
        output=embedding if tied else target.head.cpu().contiguous(),
        target_norm=None if target.norm is None else target.norm.cpu(),
    )


def save_basis(folder: Path, basis: Basis) -> None:
    """Write it to ``folder``."""
    tensors = {
        "ids": basis.vocabulary.ids,
        "scale": basis.scale,
        "embedding": basis.embedding,
    }
    if basis.output is not basis.embedding:
        tensors["output"] = basis.output
    if basis.target_norm is not None:
        tensors["target_norm"] = basis.target_norm
    write_atomically(folder / "basis.safetensors", lambda temporary: save_file(tensors, temporary))
    write_text_atomically(folder / "basis.json", json.dumps(basis.shape.as_facts(), indent=1) + "\n")


def load_basis(folder: Path) -> Basis | None:
    """What :func:`save_basis` wrote; None if it has not.

    Raises:
        ConfigError: another version of this program wrote it.
    """
    if not (folder / "basis.json").is_file():
        return None
    facts = json.loads((folder / "basis.json").read_text("utf-8"))
    shape = HeadShape(**{**facts, "aux_layers": tuple(facts["aux_layers"])})
    tensors = load_file(folder / "basis.safetensors")
    if "target_head" in tensors:  # states were kept the same, but not the target's whole output layer
        raise ConfigError(
            f"work: got {str(folder)!r} of an older version, expected another folder; its conversations.jsonl can be "
            "given as --conversations"
        )
    return Basis(
        shape=shape,
        vocabulary=DraftVocabulary(tensors["ids"], shape.vocab),
        scale=tensors["scale"],
        embedding=tensors["embedding"],
        output=tensors.get("output", tensors["embedding"]),
        target_norm=tensors.get("target_norm"),
    )
