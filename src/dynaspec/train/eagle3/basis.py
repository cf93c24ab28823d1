"""What a run fixes before it trains: shape, draft vocabulary, scale of the states; kept in the work folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dynaspec.contract.errors import ConfigError
from dynaspec.train.eagle3.conversations import Conversation
from dynaspec.train.eagle3.head import Head, initialise
from dynaspec.train.eagle3.shape import HeadShape, shape_for
from dynaspec.train.eagle3.start import Start
from dynaspec.train.eagle3.target import Target, channel_scale, eos_ids, head_rows, read_config
from dynaspec.train.eagle3.vocabulary import DraftVocabulary, most_frequent
from dynaspec.train.files import write_atomically, write_text_atomically

SCALE_CONVERSATIONS = 64


@dataclass(frozen=True, slots=True)
class Basis:
    """``scale`` is [aux_width] float32; ``target_head`` [draft_vocab, hidden], ``embedding`` [vocab, hidden] and
    ``target_norm`` [hidden] are the target's, in its dtype."""

    shape: HeadShape
    vocabulary: DraftVocabulary
    scale: Tensor
    embedding: Tensor
    target_head: Tensor
    target_norm: Tensor | None

    def head(self, seed: int, device: torch.device, dtype: torch.dtype) -> Head:
        """A head with its start weights in float32; the frozen embedding in ``dtype``."""
        head = Head(self.shape, self.embedding.to(dtype), self.scale)
        initialise(head, self.target_head, self.target_norm, seed)
        return head.to(device)


def make_basis(
    model: str,
    target: Target,
    conversations: Sequence[Conversation],
    draft_vocab: int,
    norm_before_residual: bool,
    start: Start | None = None,
) -> Basis:
    """Choose vocabulary and scale by ``conversations``; the vocabulary of ``start`` stays what it is.

    Raises:
        ConfigError: there are none, or the target's configuration lacks a size.
    """
    if not conversations:
        raise ConfigError("conversations: got none, expected some to take the draft vocabulary from")
    config = read_config(model)
    if start is None:
        vocab = int(config["vocab_size"])
        answers = (torch.tensor(c.answer) for c in conversations)
        vocabulary = most_frequent(answers, vocab, min(draft_vocab, vocab), eos_ids(config))
    else:
        vocabulary, norm_before_residual = start.vocabulary, start.norm_before_residual
    shape = shape_for(config, len(vocabulary.ids), norm_before_residual)
    some = conversations[:: max(1, len(conversations) // SCALE_CONVERSATIONS)]
    aux = torch.cat([target.hidden(torch.tensor(c.tokens), shape.aux_layers)[0] for c in some])
    return Basis(
        shape=shape,
        vocabulary=vocabulary,
        scale=channel_scale(aux).cpu(),
        embedding=target.embedding.cpu().contiguous(),
        target_head=head_rows(target.head, vocabulary).cpu(),
        target_norm=None if target.norm is None else target.norm.cpu(),
    )


def save_basis(folder: Path, basis: Basis) -> None:
    """Write it to ``folder``."""
    tensors = {
        "ids": basis.vocabulary.ids,
        "scale": basis.scale,
        "embedding": basis.embedding,
        "target_head": basis.target_head,
    }
    if basis.target_norm is not None:
        tensors["target_norm"] = basis.target_norm
    write_atomically(folder / "basis.safetensors", lambda temporary: save_file(tensors, temporary))
    write_text_atomically(folder / "basis.json", json.dumps(basis.shape.as_facts(), indent=1) + "\n")


def load_basis(folder: Path) -> Basis | None:
    """What :func:`save_basis` wrote; None if it has not."""
    if not (folder / "basis.json").is_file():
        return None
    facts = json.loads((folder / "basis.json").read_text("utf-8"))
    shape = HeadShape(**{**facts, "aux_layers": tuple(facts["aux_layers"])})
    tensors = load_file(folder / "basis.safetensors")
    return Basis(
        shape=shape,
        vocabulary=DraftVocabulary(tensors["ids"], shape.vocab),
        scale=tensors["scale"],
        embedding=tensors["embedding"],
        target_head=tensors["target_head"],
        target_norm=tensors.get("target_norm"),
    )
