"""The memory behind the blocks: one arena a model, all under the same block ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynaspec.contract.errors import CapacityError
from dynaspec.memory import zeros

_TOUCHED = 1 << 29
"""Bytes of an arena, those of the blocks handed out first, whose pages are mapped at once: a step that meets a new page
waits for it, on a virtual machine for as long as it takes itself."""


@dataclass(frozen=True, slots=True)
class Arena:
    """K and V of every layer of one model; shapes are the attention backend's."""

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
