"""Which blocks each lane holds, and which of them the prefix cache may offer to others."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import IntegrityError

from .pool import BlockPool

_ROOT = b"dynaspec"


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
