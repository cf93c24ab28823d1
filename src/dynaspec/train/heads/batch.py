"""Conversations joined into one batch of rows, without padding.

Row i of a conversation pairs token i + 1 with the target's hidden states at token i; it stands at
position i. A *chain* starts at a row from which the next token is already known and the one after
it is to be drafted::

    tokens     p0 p1 p2 | a0 a1 a2 a3          prompt of 3, answer of 4
    rows        0  1  2    3  4  5             row 2 pairs a0 with the states at p2
    chains            0    1  2                chain 0 drafts a1, then a2, a3
    labels            a1   a2 a3               label n is what chain n drafts first

Draft j of chain n is therefore label n + j, if that still belongs to the same conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation with the target's states.

    ``tokens`` [length] int64, ``prompt`` of them being the prompt's; ``aux`` [length − 1, aux_width], divided by
    the scale; ``last`` [chains, hidden] the state under each label's logits; ``mass`` [chains] float32 the share
    of the target's probability that lies in the draft vocabulary.
    """

    tokens: Tensor
    prompt: int
    aux: Tensor
    last: Tensor
    mass: Tensor

    @property
    def chains(self) -> int:
        """Chains that start in it."""
        return len(self.mass)


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples joined: rows [rows] of all of them, chains [chains] of all of them.

    ``row_spans`` and ``chain_spans`` say where each conversation's begin and end; ``chain_rows`` is the row that a
    chain starts at and ``room`` how many drafts it can make beyond the first.
    """

    next_tokens: Tensor
    positions: Tensor
    aux: Tensor
    chain_rows: Tensor
    room: Tensor
    labels: Tensor
    last: Tensor
    mass: Tensor
    row_spans: tuple[tuple[int, int], ...]
    chain_spans: tuple[tuple[int, int], ...]

    @property
    def chains(self) -> int:
        """Chains in all."""
        return len(self.chain_rows)

    def to(self, device: torch.device) -> Batch:
        """The same on ``device``."""
        return Batch(
            next_tokens=self.next_tokens.to(device),
            positions=self.positions.to(device),
            aux=self.aux.to(device),
            chain_rows=self.chain_rows.to(device),
            room=self.room.to(device),
            labels=self.labels.to(device),
            last=self.last.to(device),
            mass=self.mass.to(device),
            row_spans=self.row_spans,
            chain_spans=self.chain_spans,
        )


def chains_of(prompt: int, length: int) -> int:
    """Chains in a conversation of ``length`` tokens: one for each answer token but the first."""
    return max(0, length - prompt - 1) if prompt else max(0, length - 2)


def join(examples: Sequence[Example]) -> Batch:
    """All of ``examples``, each with at least one chain."""
    next_tokens, positions, chain_rows, room, row_spans, chain_spans = [], [], [], [], [], []
    rows = chains = 0
    for example in examples:
        length, count = len(example.tokens), example.chains
        first = length - 1 - count - 1
        next_tokens.append(example.tokens[1:])
        positions.append(torch.arange(length - 1))
        chain_rows.append(torch.arange(rows + first, rows + first + count))
        room.append(torch.arange(count - 1, -1, -1))
        row_spans.append((rows, rows + length - 1))
        chain_spans.append((chains, chains + count))
        rows += length - 1
        chains += count
    return Batch(
        next_tokens=torch.cat(next_tokens),
        positions=torch.cat(positions),
        aux=torch.cat([e.aux for e in examples]),
        chain_rows=torch.cat(chain_rows),
        room=torch.cat(room),
        labels=torch.cat([e.tokens[len(e.tokens) - e.chains :] for e in examples]),
        last=torch.cat([e.last for e in examples]),
        mass=torch.cat([e.mass for e in examples]),
        row_spans=tuple(row_spans),
        chain_spans=tuple(chain_spans),
    )
