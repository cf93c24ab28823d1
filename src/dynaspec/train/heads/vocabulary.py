"""The draft vocabulary: the tokens that the target writes most often."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dynaspec.contract.errors import ConfigError


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

    @property
    def draft_ids(self) -> Tensor:
        """[vocab] int64: draft id of every target id, −1 where there is none."""
        ids = torch.full((self.size,), -1, dtype=torch.int64)
        ids[self.ids] = torch.arange(len(self.ids))
        return ids


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
