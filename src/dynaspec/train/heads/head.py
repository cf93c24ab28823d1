"""What every head is to training: drafts from every chain of a batch, and tensors of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynaspec.contract.errors import ConfigError
from dynaspec.train.heads.batch import Batch


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
