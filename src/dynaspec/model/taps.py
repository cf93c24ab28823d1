"""Hidden states of a model that drafters read, kept in a paged arena under the blocks of its KV.

A drafter of hidden states (EAGLE, Medusa, MTP) cannot compute them later from tokens, as a draft model can. Kept like
KV, under the same block ids, they are there for every committed token whose KV is: after steps that drafted nothing,
rejections, prefix hits, preemption and chunked prefill. So such a drafter reads on when it next drafts, by the same
watermark rule as a draft model, and nobody has to be told which rows of a pass were whose, or accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.memory import zeros

from .batch import BLOCK_SIZE

_TOUCHED = 1 << 26
"""Bytes whose pages are mapped at once, for the reason that ``kv.blocks`` gives: states are a fraction of keys and
values."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Which hidden states are kept, and where. States are numbered 0 … n + 1 in a model of n layers: i < n is what
    enters layer i (0: the embedding), n is the sum of all layers, n + 1 the same after the final norm, which logits
    are made of."""

    states: tuple[int, ...]
    """Kept side by side, in this order."""
    arena: torch.Tensor
    """[blocks · BLOCK_SIZE + 1, states · hidden] in the model's dtype: a row for every KV slot; slot −1 is the last."""
    columns: npt.NDArray[np.int64]
    """[n + 2] the column where each state begins; −1 = it is not kept."""

    @classmethod
    def allocate(
        cls, states: Sequence[int], blocks: int, layers: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> Taps:
        """Zeroed memory for the states of a model with so many layers, as wide as ``hidden``."""
        columns = np.full(layers + 2, -1, np.int64)
        columns[list(states)] = hidden * np.arange(len(states))
        arena = zeros((blocks * BLOCK_SIZE + 1, len(states) * hidden), dtype, device, _TOUCHED)
        return cls(tuple(states), arena, columns)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies the states at the slots ``source`` [n] to ``target`` [n], on the arena's device."""
        self.arena[target] = self.arena[source]

    def keep(self, state: int, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        """Keeps a state [R, hidden], if it is wanted, at ``slots`` [R] (on the arena's device; −1 = nowhere)."""
        at = int(self.columns[state])
        if at < 0:
            return
        self.arena[:, at : at + hidden.shape[1]][slots] = hidden
