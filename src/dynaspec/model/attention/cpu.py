"""Paged attention on CPU in float32, by the numba kernels."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.kernels import paged_attention as kernels
from dynaspec.model.kernels.simd import LANES

from .base import KV, AttentionSpec, Shape

_UNIT_ROWS = 16
_PARALLEL_WORK = 1 << 22
"""Multiplications of one layer from which a second thread pays for being woken (about 0.2 ms)."""
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
        heads = self.spec.num_kv_heads
        end = (len(cost) - 1) * heads
        if self._pool is None or int(cost[-1]) * self.spec.num_heads * self.spec.head_dim < _PARALLEL_WORK:
            return 0, end
        cumulative = np.repeat(np.diff(cost), heads).cumsum()
        shares = np.linspace(0, int(cumulative[-1]), self._threads + 1)[1:-1]
        return 0, *np.searchsorted(cumulative, shares, side="right").tolist(), end

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KV, meta: CpuMeta, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        batch, spec, bounds = meta.batch, self.spec, meta.bounds
        queries, k_cache, v_cache = q.numpy(), kv[0].numpy(), kv[1].numpy()
        kernels.write_kv(k.numpy(), v.numpy(), k_cache, v_cache, batch.slots)
        out = torch.empty(q.shape[0], spec.num_heads * spec.head_dim)
        target = out.numpy()

        def work(first: int, end: int) -> None:
            kernels.attend(
                queries,
                k_cache,
                v_cache,
                target,
                meta.units,
                first,
                end,
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

        if self._pool is None or len(bounds) == 2:
            work(*bounds)
            return out
        others = [self._pool.submit(work, *share) for share in pairwise(bounds[1:])]
        work(bounds[0], bounds[1])
        for other in others:
            other.result()
        return out
