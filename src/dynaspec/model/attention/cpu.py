"""Paged attention on CPU, on caches in float32 or bfloat16, by the numba kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.model.batch import BLOCK_SIZE, NO_ANCESTORS, ForwardBatch
from dynaspec.model.kernels import paged_attention as kernels
from dynaspec.model.kernels.attention_work import plan_work
from dynaspec.model.kernels.simd import LANES
from dynaspec.model.kernels.team import team_size

from .base import KV, AttentionSpec, Shape

_TEAM_WORK = 1 << 15
"""Multiplications of one layer from which more threads than one are faster: they also read keys and values from memory
faster."""


def attention_work(spec: AttentionSpec) -> int:
    """Rows · keys from which more threads than one are faster."""
    return _TEAM_WORK // (spec.num_heads * spec.head_dim)


@dataclass(slots=True)
class CpuMeta:
    """What attention needs of a pass."""

    positions: torch.Tensor
    slots: torch.Tensor
    work: tuple[Any, ...]
    """``units`` … ``chains`` of ``kernels.attend``, in its order."""


def _arrays(kv: KV) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The same caches for compiled code, bfloat16 as uint16."""
    if kv[0].dtype != torch.bfloat16:
        return kv[0].numpy(), kv[1].numpy()
    kernels.load_bfloat16()
    return kv[0].view(torch.uint16).numpy(), kv[1].view(torch.uint16).numpy()


class CpuAttention:
    """Bitwise the same result for a row, whatever else is in the pass and however it is split over threads.

    K blocks are [kv heads, head_dim rounded up to 2, 16] and V blocks [kv heads, 16, head_dim rounded up to 16], see
    ``paged_attention``.
    """

    def __init__(self, spec: AttentionSpec, threads: int) -> None:
        self.spec = spec
        self._threads = team_size(threads)

    def kv_shape(self, num_blocks: int) -> tuple[Shape, Shape]:
        even, padded = (-(-self.spec.head_dim // multiple) * multiple for multiple in (2, LANES))
        leading = (num_blocks, self.spec.num_kv_heads)
        return (*leading, even, BLOCK_SIZE), (*leading, BLOCK_SIZE, padded)

    def move(self, kv: KV, source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``AttentionBackend.move``."""
        kernels.move_kv(*_arrays(kv), source.numpy(), target.numpy())

    def prepare(self, batch: ForwardBatch) -> CpuMeta:
        spec = self.spec
        ancestors = NO_ANCESTORS if batch.ancestors is None else batch.ancestors
        units, chains, bounds, kept = plan_work(
            batch.query_start,
            batch.context_lens,
            batch.slots,
            batch.positions,
            ancestors,
            spec.num_heads,
            spec.num_kv_heads,
            self._threads,
            attention_work(spec),
        )
        tables = batch.query_start, batch.context_lens, batch.block_tables, batch.slots, batch.positions
        work = units, bounds, kept, *tables, ancestors, chains
        return CpuMeta(torch.from_numpy(batch.positions), torch.from_numpy(batch.slots), work)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KV, meta: CpuMeta, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        spec = self.spec
        k_cache, v_cache = _arrays(kv)
        kernels.write_kv(k.numpy(), v.numpy(), k_cache, v_cache, meta.slots.numpy())
        out = np.empty((q.shape[0], spec.num_heads * spec.head_dim), np.float32)
        settings = spec.scale, spec.softcap or 0.0, window or 0, spec.hidden_keys
        kernels.attend(q.numpy(), k_cache, v_cache, out, *meta.work, *settings)
        return torch.from_numpy(out)
