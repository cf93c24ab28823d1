"""Paged attention on CPU in float32, by the numba kernels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.kernels import paged_attention as kernels
from dynaspec.model.kernels.simd import LANES

from .base import KV, AttentionSpec, Shape

_UNIT_ROWS = 16
_PARALLEL_WORK = 1 << 21
"""Multiplications of one layer from which a second thread pays for being woken (about 0.1 ms)."""
_NO_ANCESTORS = np.empty(0, np.int64)


@dataclass(slots=True)
class CpuMeta:
    """What ``attend`` needs of a pass, as arrays."""

    positions: torch.Tensor
    batch: ForwardBatch
    ancestors: npt.NDArray[np.int64]
    units: npt.NDArray[np.int32]
    chains: npt.NDArray[np.bool_]
    bounds: tuple[int, ...]
    """Units of work of thread i: bounds[i] … bounds[i + 1] − 1."""
    longest: int


class CpuAttention:
    """Bitwise the same result for a row, whatever else is in the pass and however it is split over threads.

    K blocks are [kv heads, head_dim, 16] and V blocks [kv heads, 16, head_dim rounded up to 16].
    """

    def __init__(self, spec: AttentionSpec, threads: int) -> None:
        self.spec = spec
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "attention") if threads > 1 else None

    def kv_shape(self, num_blocks: int) -> tuple[Shape, Shape]:
        padded = -(-self.spec.head_dim // LANES) * LANES
        leading = (num_blocks, self.spec.num_kv_heads)
        return (*leading, self.spec.head_dim, BLOCK_SIZE), (*leading, BLOCK_SIZE, padded)

    def prepare(self, batch: ForwardBatch) -> CpuMeta:
        trees = batch.ancestors is not None
        units, chains, cost = kernels.plan_work(
            batch.query_start, batch.context_lens, batch.slots, batch.positions, trees, _UNIT_ROWS
        )
        rows = batch.query_start[1:] - batch.query_start[:-1]
        return CpuMeta(
            positions=torch.from_numpy(batch.positions),
            batch=batch,
            ancestors=_NO_ANCESTORS if batch.ancestors is None else batch.ancestors,
            units=units,
            chains=chains,
            bounds=self._split(cost),
            longest=int((batch.context_lens + rows).max()),
        )

    def _split(self, cost: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """Shares of about equal cost, one a thread; a single share where the pass is small."""
        total, heads = int(cost[-1]), self.spec.num_kv_heads
        end = (len(cost) - 1) * heads
        if self._pool is None or total * self.spec.num_heads * self.spec.head_dim < _PARALLEL_WORK:
            return 0, end
        by_head = np.linspace(0, total * heads, self._threads + 1)[1:-1]
        units = np.searchsorted(cost * heads, by_head, side="right") - 1
        within = (by_head - cost[units] * heads) / (cost[units + 1] - cost[units])
        return 0, *(units * heads + within.round().astype(np.int64)).tolist(), end

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KV, meta: CpuMeta, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        batch, spec = meta.batch, self.spec
        k_cache, v_cache = kv[0].numpy(), kv[1].numpy()
        kernels.write_kv(k.numpy(), v.numpy(), k_cache, v_cache, batch.slots)
        out = torch.empty(q.shape[0], spec.num_heads * spec.head_dim)
        shared = (q.numpy(), k_cache, v_cache, out.numpy(), meta.units)
        rest = (
            meta.longest,
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
            batch.slots,
            batch.positions,
            meta.ancestors,
            meta.chains,
            spec.scale,
            spec.softcap or 0.0,
            window or 0,
        )
        bounds = meta.bounds
        if self._pool is None or len(bounds) == 2:
            kernels.attend(*shared, 0, bounds[-1], *rest)
            return out
        others = [
            self._pool.submit(kernels.attend, *shared, bounds[i], bounds[i + 1], *rest)
            for i in range(1, len(bounds) - 1)
        ]
        kernels.attend(*shared, bounds[0], bounds[1], *rest)
        for other in others:
            other.result()
        return out
