"""Edits of single entries of a score matrix: masks, biases and penalties, on any device.

Elementwise float32 arithmetic only, so that an entry's bits do not depend on what else is edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .rng import Int64

Float32 = npt.NDArray[np.float32]


@dataclass(slots=True)
class Entries:
    """Some tokens of some rows of a score matrix."""

    flat: torch.Tensor
    """[N] int64 row · V + token"""
    sizes: Int64
    """How many of the N entries belong to each of the rows, in order."""

    @classmethod
    def of(cls, rows: Int64, tokens: Sequence[Int64], vocab_size: int, device: torch.device) -> Entries:
        """``tokens[i]`` of row ``rows[i]``."""
        sizes = np.fromiter((column.size for column in tokens), np.int64, len(tokens))
        flat = np.concatenate(tokens) + np.repeat(rows * vocab_size, sizes)
        return cls(torch.from_numpy(flat).to(device), sizes)


def forbid(scores: torch.Tensor, entries: Entries) -> None:
    """Sets the entries to −inf."""
    scores.view(-1).index_fill_(0, entries.flat, -torch.inf)


def allow_only(scores: torch.Tensor, rows: Int64, entries: Entries) -> None:
    """Sets all but the entries of ``rows``, which must be distinct, to −inf."""
    kept = _read(scores, entries)
    scores[torch.from_numpy(rows).to(scores.device)] = -torch.inf
    _write(scores, entries, kept)


def add(scores: torch.Tensor, entries: Entries, values: Sequence[Float32]) -> None:
    """Adds ``values`` to the entries, which must be distinct."""
    _write(scores, entries, _read(scores, entries) + torch.from_numpy(np.concatenate(values)).to(scores.device))


def penalise(
    scores: torch.Tensor,
    entries: Entries,
    counts: Sequence[Float32],
    repetition: Float32,
    frequency: Float32,
    presence: Float32,
) -> None:
    """Penalises tokens already seen.

    Args:
        scores: [R, V], changed in place
        entries: the distinct tokens of each row's prompt and output
        counts: for each row, how often the output holds each of them
        repetition: [rows] divides positive and multiplies negative scores of all entries
        frequency: [rows] subtracted once for each occurrence in the output
        presence: [rows] subtracted if the output holds the token
    """

    def spread(column: Float32) -> torch.Tensor:
        return torch.from_numpy(np.repeat(column, entries.sizes)).to(scores.device)

    count = torch.from_numpy(np.concatenate(counts)).to(scores.device)
    factor = spread(repetition)
    values = _read(scores, entries)
    values = torch.where(values > 0, values / factor, values * factor)
    values -= spread(frequency) * count
    values -= spread(presence) * (count > 0)
    _write(scores, entries, values)


def _read(scores: torch.Tensor, entries: Entries) -> torch.Tensor:
    return scores.view(-1).index_select(0, entries.flat)


def _write(scores: torch.Tensor, entries: Entries, values: torch.Tensor) -> None:
    scores.view(-1).index_copy_(0, entries.flat, values)
