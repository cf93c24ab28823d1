"""The target's states along conversations.

Either as many processes as are asked for make them once, in shards that appear whole, and training reads them through
the page cache; or they are made anew for every batch, which takes no disk.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.multiprocessing
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dynaspec.contract.errors import ConfigError
from dynaspec.train.run import write_atomically

from .basis import Basis, FrozenTarget, load_basis
from .conversations import Conversation, read_conversations
from .head import Batch, Example, chains_of, join
from .shape import DraftVocabulary

SHARD_CONVERSATIONS = 128
Ref = tuple[int, int]  # shard, conversation in it


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
    target: FrozenTarget,
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
        states = target.states([tokens], [chains], layers, vocabulary)[0]
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
        return int(self.spans.chains[index + 1] - self.spans.chains[index])

    def example(self, index: int) -> Example:
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
    return folder / f"states-{number:05d}.safetensors"


class Counted(Protocol):
    """Conversations whose chains can be counted without their states."""

    def __len__(self) -> int: ...

    def chains(self, index: int) -> int:
        """Chains in a conversation."""
        ...


class StateSource(Protocol):
    """What is trained on."""

    @property
    def shards(self) -> Sequence[Counted]:
        """Those that are there."""
        ...

    def refresh(self) -> int:
        """Take in shards that have appeared; returns how many there are."""
        ...

    def batch(self, refs: Sequence[Ref]) -> Batch:
        """Conversations with their states."""
        ...


class TextShard:
    """Conversations of which the tokens alone are kept."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        self._prompts = [len(c.prompt) for c in conversations]
        self._tokens = [torch.tensor(c.tokens) for c in conversations]

    def __len__(self) -> int:
        return len(self._tokens)

    def chains(self, index: int) -> int:
        return chains_of(self._prompts[index], len(self._tokens[index]))

    def text(self, index: int) -> tuple[Tensor, int]:
        """Tokens [length] int64 of a conversation, and how many of them are the prompt's."""
        return self._tokens[index], self._prompts[index]


class StatesOnDemand:
    """States that ``target`` makes for every batch; see :class:`StateSource`. What has come meanwhile is a shard."""

    def __init__(self, place: StatesPlace, target: FrozenTarget, basis: Basis, longest: int) -> None:
        """``longest``: conversations with more tokens are passed over."""
        self._place, self._target, self._basis, self._longest = place, target, basis, longest
        self._scale = basis.scale.to(target.device)
        self._read = 0  # conversations of the file that the shards cover
        self.shards: list[TextShard] = []
        self.refresh()

    def refresh(self) -> int:
        conversations = list(read_conversations(self._place.conversations))
        new = trained_on(conversations[self._read :], self._longest, set(held_out_prompts(self._place)))
        self._read = len(conversations)
        if new:
            self.shards.append(TextShard(new))
        return len(self.shards)

    def batch(self, refs: Sequence[Ref]) -> Batch:
        texts = [self.shards[shard].text(i) for shard, i in refs]
        chains = [self.shards[shard].chains(i) for shard, i in refs]
        layers, vocabulary = self._basis.shape.aux_layers, self._basis.vocabulary
        states = self._target.states([tokens for tokens, _ in texts], chains, layers, vocabulary)
        return join(
            [
                Example(tokens, prompt, (state.aux / self._scale).to(torch.bfloat16), state.last, state.mass)
                for (tokens, prompt), state in zip(texts, states, strict=True)
            ]
        )


class Cache:
    """All shards in ``folder``, in the order in which they came; see :class:`StateSource`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.shards: list[Shard] = []
        self.refresh()

    def refresh(self) -> int:
        while (path := shard_path(self._folder, len(self.shards))).is_file():
            self.shards.append(Shard(path))
        return len(self.shards)

    def batch(self, refs: Sequence[Ref]) -> Batch:
        if max(shard for shard, _ in refs) >= len(self.shards):  # another process has seen more of them
            self.refresh()
        return join([self.shards[shard].example(i) for shard, i in refs])


@dataclass(frozen=True, slots=True)
class StatesPlace:
    """Files of the states; conversation number ``through`` of the file is the first that no shard covers."""

    folder: Path

    @property
    def shards(self) -> Path:
        """Folder of what is trained on."""
        return self.folder / "states"

    @property
    def held_out(self) -> Path:
        """Folder of what is measured on."""
        return self.folder / "held-out"

    @property
    def held_out_conversations(self) -> Path:
        """The texts of what is measured on."""
        return self.folder / "held-out.jsonl"

    @property
    def conversations(self) -> Path:
        """All conversations, in the order in which they came."""
        return self.folder / "conversations.jsonl"

    def next_shard(self) -> int:
        """Number of the first shard that is missing."""
        number = 0
        while shard_path(self.shards, number).is_file():
            number += 1
        return number

    def through(self) -> int:
        """Conversations that the shards cover."""
        number = self.next_shard()
        if number == 0:
            return 0
        with safe_open(shard_path(self.shards, number - 1), framework="pt") as file:
            return int(file.metadata()["through"])


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Conversations [begin, end) of the file, as shard ``number``."""

    number: int
    begin: int
    end: int


def held_out_indices(conversations: Sequence[Conversation], count: int, longest: int) -> list[int]:
    """``count`` conversations spread over the file, greedy ones only where there are enough."""
    fit = [i for i, c in enumerate(conversations) if trainable(c, longest)]
    greedy = [i for i in fit if conversations[i].temperature == 0.0]
    pool = greedy if len(greedy) >= 2 * count else fit
    count = min(count, max(1, len(pool) // 4))
    return [pool[(2 * k + 1) * len(pool) // (2 * count)] for k in range(count)] if pool else []


def plan_shards(through: int, total: int, first: int, size: int = SHARD_CONVERSATIONS) -> list[ShardJob]:
    """Shards for the conversations [through, total)."""
    begins = range(through, total, size)
    return [ShardJob(first + k, b, min(total, b + size)) for k, b in enumerate(begins)]


def compute_states(
    model: str,
    place: StatesPlace,
    dtype: torch.dtype,
    device: torch.device,
    workers: int,
    longest: int,
    room_gb: float,
    say: Callable[[str], None],
) -> None:
    """Shards for all conversations that have none yet.

    Raises:
        ConfigError: the states would take more than ``room_gb``, or more than the disk has; there is no basis.
    """
    conversations = list(read_conversations(place.conversations))
    jobs = plan_shards(place.through(), len(conversations), place.next_shard())
    if not jobs:
        return
    _check_room(conversations, load_basis(place.folder), place, room_gb)
    workers = max(1, min(workers, len(jobs)))
    say(f"states of {len(conversations) - jobs[0].begin} conversations, {workers} process(es)")
    arguments = [(model, str(place.folder), dtype, str(device), longest, jobs[k::workers]) for k in range(workers)]
    if workers == 1:
        _compute(*arguments[0])
        return
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compute, args=a, daemon=True) for a in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if wrong := [p.exitcode for p in processes if p.exitcode]:
        raise ConfigError(f"states: a process ended with exit status {wrong[0]}, expected 0")


def _compute(model: str, folder: str, dtype: torch.dtype, device: str, longest: int, jobs: Sequence[ShardJob]) -> None:
    if device == "cpu":
        torch.set_num_threads(1)
    place = StatesPlace(Path(folder))
    basis = load_basis(place.folder)
    target = FrozenTarget(model, dtype, torch.device(device))
    conversations = list(read_conversations(place.conversations))
    held_out = set(held_out_prompts(place))
    parent = multiprocessing.parent_process()
    for job in jobs:
        if parent is not None and not parent.is_alive():
            return  # it was killed, and another run may be at the same shards
        some = trained_on(conversations[job.begin : job.end], longest, held_out)
        if some:
            write_shard(
                shard_path(place.shards, job.number),
                some,
                target,
                basis.shape.aux_layers,
                basis.vocabulary,
                basis.scale,
                job.end,
            )


def trained_on(
    conversations: Sequence[Conversation], longest: int, held_out: Collection[tuple[int, ...]]
) -> list[Conversation]:
    """Those of ``conversations`` that can be trained on and are not ``held_out``."""
    return [c for c in conversations if trainable(c, longest) and c.tokens not in held_out]


def held_out_prompts(place: StatesPlace) -> list[tuple[int, ...]]:
    """Tokens of the conversations that are measured on."""
    path = place.held_out_conversations
    return [c.tokens for c in read_conversations(path)] if path.is_file() else []


def _check_room(conversations: Sequence[Conversation], basis: Basis, place: StatesPlace, room_gb: float) -> None:
    width = basis.shape.aux_width + basis.shape.hidden
    needed = sum(len(c.tokens) for c in conversations) * width * 2 / 1e9
    free = shutil.disk_usage(place.folder).free / 1e9
    if needed > room_gb:
        raise ConfigError(f"states: got {needed:.1f} GB of them, expected at most {room_gb:g}; raise --states-gb")
    left = sum(len(c.tokens) for c in conversations[place.through() :]) * width * 2 / 1e9
    if left > free - 1:
        raise ConfigError(f"states: got {left:.1f} GB to write, expected to have that on disk; {free:.1f} GB are free")
