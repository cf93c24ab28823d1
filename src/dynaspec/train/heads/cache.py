"""The target's states on disk, in shards that appear whole; training reads them through the page cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dynaspec.train.files import write_atomically
from dynaspec.train.heads.batch import Example, chains_of
from dynaspec.train.heads.conversations import Conversation
from dynaspec.train.heads.target import Target
from dynaspec.train.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the conversations of a shard lie; ``tokens``, ``rows`` and ``chains`` [count + 1] are cumulated counts."""

    tokens: Tensor
    rows: Tensor
    chains: Tensor
    prompts: Tensor
    temperatures: Tensor


def trainable(conversation: Conversation, longest: int) -> bool:
    """Whether there is anything to draft in it and it fits ``longest`` tokens."""
    length = len(conversation.tokens)
    return length <= longest and chains_of(len(conversation.prompt), length) > 0


def write_shard(
    path: Path,
    conversations: Sequence[Conversation],
    target: Target,
    layers: tuple[int, ...],
    vocabulary: DraftVocabulary,
    scale: Tensor,
    through: int = 0,
) -> int:
    """Compute and write the states of ``conversations``; returns the chains in them.

    ``through`` is noted in the file: how many conversations of their file are dealt with.
    """
    parts: dict[str, list[Tensor]] = {"tokens": [], "aux": [], "last": [], "mass": []}
    counts = []
    for conversation in conversations:
        tokens = torch.tensor(conversation.tokens)
        chains = chains_of(len(conversation.prompt), len(tokens))
        states = target.states(tokens, chains, layers, vocabulary)
        parts["tokens"].append(tokens.int())
        parts["aux"].append((states.aux / scale.to(states.aux.device)).to("cpu", torch.bfloat16))
        parts["last"].append(states.last.to("cpu", torch.bfloat16))
        parts["mass"].append(states.mass.cpu())
        counts.append((len(tokens), len(tokens) - 1, chains))
    ends = torch.tensor([(0, 0, 0), *counts]).cumsum(0)
    tensors = {name: torch.cat(pieces) for name, pieces in parts.items()}
    tensors |= {
        "token_ends": ends[:, 0].contiguous(),
        "row_ends": ends[:, 1].contiguous(),
        "chain_ends": ends[:, 2].contiguous(),
        "prompts": torch.tensor([len(c.prompt) for c in conversations]),
        "temperatures": torch.tensor([c.temperature for c in conversations]),
    }
    write_atomically(path, lambda temporary: save_file(tensors, temporary, {"through": str(through)}))
    return int(ends[-1, 2])


class Shard:
    """One file of states, read piece by piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, framework="pt") as file:
            self.spans = Spans(
                *(file.get_tensor(n) for n in ("token_ends", "row_ends", "chain_ends", "prompts", "temperatures"))
            )

    def __len__(self) -> int:
        return len(self.spans.prompts)

    def chains(self, index: int) -> int:
        """Chains in a conversation."""
        return int(self.spans.chains[index + 1] - self.spans.chains[index])

    def example(self, index: int) -> Example:
        """A conversation with its states."""
        spans = self.spans
        tokens, rows, chains = (
            slice(int(ends[index]), int(ends[index + 1])) for ends in (spans.tokens, spans.rows, spans.chains)
        )
        with safe_open(self.path, framework="pt") as file:
            return Example(
                tokens=file.get_slice("tokens")[tokens].long(),
                prompt=int(spans.prompts[index]),
                aux=file.get_slice("aux")[rows],
                last=file.get_slice("last")[chains],
                mass=file.get_slice("mass")[chains],
            )


def shard_path(folder: Path, number: int) -> Path:
    """File of shard ``number``."""
    return folder / f"states-{number:05d}.safetensors"


class Cache:
    """All shards in ``folder``, in the order in which they came."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shards: list[Shard] = []
        self.refresh()

    def refresh(self) -> int:
        """Take in shards that have appeared; returns how many there are."""
        while (path := shard_path(self._folder, len(self.shards))).is_file():
            self.shards.append(Shard(path))
        return len(self.shards)
