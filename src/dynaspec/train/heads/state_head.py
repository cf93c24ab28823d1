"""Heads that draft from one vector, the target's last final state, and see no text: Medusa's and the MLP speculator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from dynaspec.train.heads.batch import Batch
from dynaspec.train.heads.head import Depth, TrainedHead, going_on, sample_chains


class StateHead(TrainedHead):
    """The *state* is what one step leaves to the next, [rows, width]."""

    @abstractmethod
    def begin(self, states: Tensor) -> Tensor:
        """The target's final states [rows, hidden] to those for the first step."""

    @abstractmethod
    def step(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """For ``tokens`` [rows], the newest ones: the next step's state, and what the output layer reads."""

    def unroll(self, batch: Batch, depths: int, share: float = 1.0, seed: int = 0) -> Iterator[Depth]:
        """See :class:`TrainedHead`."""
        rows, sampled = batch.chain_rows, sample_chains(batch, share, seed)
        alive = torch.arange(batch.chains, device=rows.device)
        state = self.begin(batch.aux[rows].float() * self.get_buffer("scale"))
        for depth in range(depths):
            state, read = self.step(depth, state, batch.next_tokens[rows[alive] + depth])
            yield Depth(alive, read)
            stay = going_on(batch, alive, depth, sampled)
            alive, state = alive[stay], state[stay]
            if not len(alive):
                return
