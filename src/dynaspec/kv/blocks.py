"""KV blocks: a pool that counts who holds them, the blocks of each lane, the prefix cache over both, and the memory
behind them.

A block is in exactly one of these states:

    owned    refs ≥ 1                  one or more lanes read it
    cached   refs = 0, has a hash      content still valid; taken last, least recently released first
    empty    refs = 0, no hash         taken first
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.errors import CapacityError, IntegrityError
from dynaspec.memory import zeros

_ROOT = b"dynaspec"
_TOUCHED = 1 << 29
"""Bytes of an arena, those of the blocks handed out first, whose pages are mapped at once: a step that meets a new page
waits for it, on a virtual machine for as long as it takes itself."""


class BlockPool:
    """Hands out block ids 0 … num_blocks − 1. Knows nothing of tokens or tensors."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.generation = np.zeros(num_blocks, dtype=np.int64)
        """[num_blocks] grows whenever a block gets new content, so that others can tell stale notes about it."""
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def free_count(self) -> int:
        """Blocks that could be handed out now, cached ones included."""
        return len(self._free)

    def try_allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None (and nothing changed) if there are not as many."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget_hash(block)
            self._refs[block] = 1
            self.generation[block] += 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more reference to an owned or cached block."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def is_shared(self, block: int) -> bool:
        """Whether more than one lane reads it."""
        return self._refs[block] > 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each; later blocks of a sequence are taken again before earlier ones."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise IntegrityError(f"block {block} was released more often than it was taken")
            if self._refs[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, key: bytes) -> int | None:
        """The block whose content has this hash, if any."""
        return self._block_of.get(key)

    def publish(self, block: int, key: bytes) -> None:
        """An owned block's content is final and has this hash. The first block of a hash keeps it."""
        if self._hash_of[block] is None and key not in self._block_of:
            self._hash_of[block] = key
            self._block_of[key] = block

    def verify_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Compares the books with the blocks that lanes really hold.

        Raises:
            IntegrityError: any difference.
        """
        held: Counter[int] = Counter(block for blocks in owners for block in blocks)
        for block in range(self.num_blocks):
            if self._refs[block] != held[block]:
                raise IntegrityError(f"block {block} has {self._refs[block]} references but {held[block]} holders")
            if (self._refs[block] == 0) != (block in self._free):
                raise IntegrityError(
                    f"block {block} has {self._refs[block]} references; its place in the free list is wrong"
                )
        for key, block in self._block_of.items():
            if self._hash_of[block] != key:
                raise IntegrityError(f"the prefix cache points to block {block}, which has another content")
        if len(self._block_of) != sum(key is not None for key in self._hash_of):
            raise IntegrityError("a block has a hash that the prefix cache does not know")

    def _forget_hash(self, block: int) -> None:
        key = self._hash_of[block]
        if key is not None:
            self._hash_of[block] = None
            del self._block_of[key]


class BlockTables:
    """Block tables of all lanes over one pool. One table serves the arenas of target and drafter."""

    def __init__(self, pool: BlockPool, max_lanes: int, max_tokens: int, block_size: int, *, caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.caching = caching
        self.array: npt.NDArray[np.int32] = np.zeros((max_lanes, -(-max_tokens // block_size)), dtype=np.int32)
        """[lanes, max blocks]; entries past a lane's blocks are undefined."""
        self._blocks: list[list[int]] = [[] for _ in range(max_lanes)]
        self._keys: list[list[bytes]] = [[] for _ in range(max_lanes)]
        self._roots = [_ROOT] * max_lanes

    def match(self, tokens: npt.NDArray[np.int32], cache_salt: str = "") -> list[int]:
        """Cached blocks that hold the KV of a prefix of ``tokens``, at most all but its last token.

        Args:
            cache_salt: only lanes opened with the same one share their blocks.
        """
        found: list[int] = []
        key = _root(cache_salt)
        for end in range(self.block_size, len(tokens), self.block_size) if self.caching else ():
            key = _chain(key, tokens[end - self.block_size : end])
            block = self.pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def try_open(self, lane: int, cached: list[int], num_tokens: int, cache_salt: str = "") -> bool:
        """Gives an empty lane the cached blocks and room for ``num_tokens``; False, and nothing changed, without it."""
        for block in cached:
            self.pool.share(block)
        fresh = self.pool.try_allocate(max(0, self._needed(num_tokens) - len(cached)))
        if fresh is None:
            self.pool.release(cached)
            return False
        self._append(lane, [*cached, *fresh])
        self._roots[lane] = _root(cache_salt)
        return True

    def try_grow(self, lane: int, num_tokens: int) -> bool:
        """Room for ``num_tokens`` in all; False, and nothing changed, if the pool has not enough."""
        missing = self._needed(num_tokens) - len(self._blocks[lane])
        if missing > 0:
            fresh = self.pool.try_allocate(missing)
            if fresh is None:
                return False
            self._append(lane, fresh)
        return True

    def shrink(self, lane: int, num_tokens: int) -> None:
        """Gives back the blocks behind those needed for ``num_tokens``."""
        keep = self._needed(num_tokens)
        blocks = self._blocks[lane]
        if len(blocks) > keep:
            self.pool.release(blocks[keep:])
            del blocks[keep:]

    def publish(self, lane: int, tokens: npt.NDArray[np.int32], computed: int) -> None:
        """Offers the lane's full blocks to others. ``tokens`` [≥ computed] are committed, with valid target KV."""
        keys = self._keys[lane]
        while self.caching and (len(keys) + 1) * self.block_size <= computed:
            start = len(keys) * self.block_size
            keys.append(_chain(keys[-1] if keys else self._roots[lane], tokens[start : start + self.block_size]))
            self.pool.publish(self._blocks[lane][len(keys) - 1], keys[-1])

    def close(self, lane: int) -> None:
        """Gives back all blocks of a lane."""
        self.pool.release(self._blocks[lane])
        self._blocks[lane] = []
        self._keys[lane] = []

    def blocks(self, lane: int) -> list[int]:
        return self._blocks[lane]

    def verify_integrity(self) -> None:
        """Integrity of tables and pool together.

        Raises:
            IntegrityError: tables, reference counts or prefix cache contradict each other.
        """
        self.pool.verify_integrity(self._blocks)
        for lane, blocks in enumerate(self._blocks):
            if self.array[lane, : len(blocks)].tolist() != blocks:
                raise IntegrityError(f"lane {lane} holds blocks {blocks} but its table row says otherwise")

    def _needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _append(self, lane: int, blocks: list[int]) -> None:
        held = self._blocks[lane]
        self.array[lane, len(held) : len(held) + len(blocks)] = blocks
        held.extend(blocks)


def _root(cache_salt: str) -> bytes:
    """What stands for the hash before a first block."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, key=_ROOT).digest() if cache_salt else _ROOT


def _chain(parent: bytes, tokens: npt.NDArray[np.int32]) -> bytes:
    """Hash of a block given the hash of all before it."""
    return hashlib.blake2b(tokens.tobytes(), digest_size=16, key=parent).digest()


@dataclass(frozen=True, slots=True)
class Arena:
    """K and V of every layer of one model. All models have the same block ids; shapes are the attention backend's."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Arena:
        """Zeroed tensors."""
        touched = _TOUCHED // (2 * num_layers)

        def layer() -> tuple[torch.Tensor, torch.Tensor]:
            key, value = (zeros(shape, dtype, device, touched) for shape in shapes)
            return key, value

        try:
            return cls(tuple(layer() for _ in range(num_layers)))
        except (RuntimeError, MemoryError) as error:
            wanted = num_layers * 2 * torch.Size(shapes[0]).numel() * dtype.itemsize
            raise CapacityError(
                f"could not allocate {wanted / 2**20:.0f} MiB of KV cache on {device}; "
                "expected a smaller kv_cache_memory"
            ) from error


def blocks_within(memory: int, bytes_per_block: int, needed: int) -> int:
    """How many blocks to make: as many as fit ``memory`` bytes, but no more than could ever be ``needed``.

    Args:
        memory: bytes for all arenas together.
        bytes_per_block: bytes of one block, summed over the arenas.
        needed: blocks for the largest batch of the longest requests.

    Raises:
        CapacityError: not one block fits.
    """
    blocks = min(memory // bytes_per_block, needed)
    if blocks < 1:
        raise CapacityError(
            f"kv_cache_memory is {memory} bytes, but one KV block of target and drafter takes {bytes_per_block}; "
            "expected more"
        )
    return int(blocks)
