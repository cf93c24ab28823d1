"""What is trained: batches of rows, what a head must do with them, and what a kind of head says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dynaspec.contract.errors import ConfigError

from .basis import Basis
from .shape import HeadShape, Start, shape_for


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
        tensors = {f.name: x.to(device) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]  # of tensors alone


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


@dataclass(frozen=True, slots=True)
class Depth:
    """What came out at one depth: ``chains`` [n] int64, and ``read`` [n, width], which the output layer reads."""

    chains: Tensor
    read: Tensor


class TrainedHead(nn.Module, ABC):
    """A head in training. What it shares with its target is frozen, in buffers, and not among the parameters.

    Hidden states come divided by ``scale`` [states' width], as the cache holds them.
    """

    def __init__(self, ids: Tensor, vocab: int, scale: Tensor) -> None:
        """``ids`` [vocabulary] int64 are the target's ids of what can be drafted, of ``vocab`` that the target has."""
        super().__init__()
        self.partial = len(ids) < vocab
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("scale", scale.float(), persistent=False)

    @property
    @abstractmethod
    def output(self) -> Tensor:
        """[vocabulary, width], the output layer."""

    @abstractmethod
    def unroll(self, batch: Batch, depths: int, share: float = 1.0, seed: int = 0) -> Iterator[Depth]:
        """Outputs of depths 0 … ``depths`` − 1, the text's own tokens being the drafts before each.

        Beyond depth 0 only a random ``share`` of the chains goes on, the same ones at every depth: deeper steps cost
        as much as the first and teach less.
        """

    def extra_loss(self, read: Tensor, states: Tensor) -> Tensor | None:
        """[rows]: what is to be minimised beside the cross-entropy, if anything.

        Args:
            read: as in :class:`Depth`.
            states: [rows, hidden], the target's own final states in their place.
        """
        return None

    def maps(self) -> dict[str, Tensor]:
        """What the checkpoint holds beside weights."""
        return {}

    def stored_name(self, name: str) -> str:
        """Name in the checkpoint of the parameter called ``name``."""
        return name

    def folds(self) -> dict[str, Tensor]:
        """By parameter, the factor that turns it into the checkpoint's weight, as that reads states as they are."""
        return {}

    def checkpoint(self) -> dict[str, Tensor]:
        """bfloat16 weights, and maps, under their names in the checkpoint."""
        folds = self.folds()
        tensors = {}
        for name, parameter in self.named_parameters():
            weight = parameter.detach() * folds[name] if name in folds else parameter.detach()
            tensors[self.stored_name(name)] = weight.to("cpu", torch.bfloat16, copy=True).contiguous()
        return tensors | self.maps()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Take over a checkpoint's weights.

        Args:
            where: they are from, for messages.

        Raises:
            ConfigError: they are not those of a head of this shape.
        """
        folds = self.folds()
        for name, parameter in self.named_parameters():
            given = tensors.get(self.stored_name(name))
            if given is None or given.shape != parameter.shape:
                got = "nothing" if given is None else list(given.shape)
                raise ConfigError(f"{where}: {self.stored_name(name)} is {got}, expected {list(parameter.shape)}")
            parameter.copy_(given)
            if name in folds:
                parameter.div_(folds[name])


def sample_chains(batch: Batch, share: float, seed: int) -> Tensor:
    """[chains] bool, ``share`` of them true: those that go on beyond depth 0."""
    device = batch.chain_rows.device
    if share >= 1.0:
        return torch.ones(batch.chains, dtype=torch.bool, device=device)
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch.chains, generator=generator) < share).to(device)


def going_on(batch: Batch, alive: Tensor, depth: int, sampled: Tensor) -> Tensor:
    """[alive] bool: which of the chains that have drafted at ``depth`` draft at the next one, too."""
    stay = batch.room[alive] > depth
    return stay & sampled[alive]


class StateHead(TrainedHead):
    """The *state* is what one step leaves to the next, [rows, width]."""

    @abstractmethod
    def begin(self, states: Tensor) -> Tensor:
        """The target's final states [rows, hidden] to those for the first step."""

    @abstractmethod
    def step(self, depth: int, state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """For ``tokens`` [rows], the newest ones: the next step's state, and what the output layer reads."""

    def unroll(self, batch: Batch, depths: int, share: float = 1.0, seed: int = 0) -> Iterator[Depth]:
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


class Kind(ABC):
    """A kind of head with its options; everything else about training is the same for all.

    Unless a kind says otherwise, it reads the target's state after the final norm, and its training begins afresh.
    """

    __slots__ = ()
    method: ClassVar[str]
    """Its name in a speculative configuration."""
    title: ClassVar[str]
    """What one is called in its card."""

    @property
    def start_from(self) -> str | None:
        """Folder or hub id of a head to train on from."""
        return None

    @property
    def options(self) -> dict[str, Any]:
        """What makes two runs of this kind different ones, beside the shape; for JSON."""
        return {}

    def shape(self, config: Mapping[str, Any], draft_vocab: int, start: Start | None) -> HeadShape:
        """Sizes for a target with Hugging Face's ``config``; ``start`` is what :meth:`start` gave.

        Raises:
            ConfigError: the target is too shallow, or its configuration lacks a size.
        """
        return shape_for(config, draft_vocab)

    def start(self, config: Mapping[str, Any]) -> Start | None:
        """The head to train on from, if one was given, for a target with Hugging Face's ``config``.

        Raises:
            CheckpointError, ConfigError: it cannot be read, or is of another kind.
        """
        return None

    @abstractmethod
    def head(self, basis: Basis, seed: int) -> TrainedHead:
        """A head with its start weights in float32."""

    @abstractmethod
    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """``config.json`` of one for the target ``verifier``, which drafts so many tokens in a row."""

    @abstractmethod
    def described(self, facts: Mapping[str, Any]) -> str:
        """What it looks like, for the card, from its ``training.json``."""
