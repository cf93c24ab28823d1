"""Reference-counted KV blocks and the prefix cache's index over them.

A block is in exactly one of these states:

    owned    refs ≥ 1                  one or more lanes read it
    cached   refs = 0, has a hash      content still valid; taken last, least recently released first
    empty    refs = 0, no hash         taken first
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from dynaspec.contract.errors import IntegrityError


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
