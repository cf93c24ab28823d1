"""The rows of one model pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

BLOCK_SIZE = 16
"""Tokens in a KV block."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

NO_ANCESTORS: Int64 = np.empty(0, np.int64)
"""``ForwardBatch.ancestors`` without trees, for compiled code."""
NO_KV_ONLY: Int32 = np.empty(0, np.int32)
"""``ForwardBatch.kv_only`` where every row is read, for compiled code."""


@dataclass(slots=True)
class ForwardBatch:
    """Ragged rows of S sequences, R in all. Slot, position and parent are independent of each other.

    Sequence s owns rows ``query_start[s]`` … ``query_start[s + 1]`` − 1. Each of them attends to the sequence's
    first ``context_lens[s]`` KV entries (in block-table order), and, of the sequence's rows in this pass, to

    * itself and all before it, if ``ancestors`` is None, or −1 for the row (a chain, or a prefill chunk);
    * those whose bit is set in its ``ancestors``, bit i being the sequence's i-th row (trees; at most 64 rows).

    Row i of sequence s has its KV entry at index ``context_lens[s] + i`` of the block table. A row with slot −1
    writes no KV and is visible to no row, itself included (padding, and draft tokens whose KV is not kept). It sees
    what it would see otherwise; where that is nothing, its attention is 0.
    """

    tokens: torch.Tensor
    """[R] int64, on the model's device."""
    positions: Int64
    """[R] position of each row in its text, which rotary or learned embeddings see."""
    slots: Int64
    """[R] block · BLOCK_SIZE + offset where the row's KV goes; −1 = nowhere."""
    query_start: Int32
    """[S + 1]"""
    context_lens: Int32
    """[S]"""
    block_tables: Int32
    """[S, max blocks]"""
    ancestors: Int64 | None = None
    """[R] bit sets, or −1; None = −1 throughout."""
    kv_only: Int32 | None = None
    """[S] how many rows at the beginning of each sequence are there for their KV only, as those of a prompt but its
    last: nobody reads what comes out of them, and no pass returns it. They are plain text, whose positions are those of
    its KV entries. None = none."""

    @property
    def rows(self) -> int:
        return int(self.slots.shape[0])

    @property
    def sequences(self) -> int:
        return int(self.context_lens.shape[0])

    def without_kv_only(self, hidden: torch.Tensor) -> torch.Tensor:
        """What comes out of all rows [R, …], without those of ``kv_only``."""
        if self.kv_only is None:
            return hidden
        places = np.arange(self.rows) - np.repeat(self.query_start[:-1], np.diff(self.query_start))
        read = np.flatnonzero(places >= np.repeat(self.kv_only, np.diff(self.query_start)))
        return hidden[torch.from_numpy(read).to(hidden.device)]
