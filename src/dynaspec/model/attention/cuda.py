"""Paged attention on CUDA: plans the tiles of a pass on the host, then launches the Triton kernels.

Everything the kernels need to know about a pass travels to the device in one pinned copy; nothing comes back,
so no layer waits for the host. Passes with the same ``CudaMeta.signature`` launch the same grids: a CUDA
graph captured over one of them replays for another after ``CudaMeta.refill``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch, Int32

from .base import KV, AttentionSpec, Shape, move_rows

FEW_ROWS_M = 64
"""Sequences of at most so many rows · query heads a KV head take one tile, others several larger ones."""
MAX_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 2
KEYS_PER_SPLIT = 128
"""Fewer keys than this do not repay a share of their own."""
ALIGNMENT = 16
"""Bytes; Triton compiles another variant for pointers aligned to less."""
COPY_TILE = 1024


@dataclass(frozen=True, slots=True)
class Launch:
    """The tiles of some of a pass's sequences."""

    tiles: torch.Tensor
    """[T, 2] int32: sequence (−1 = none), first row."""
    tile_m: int
    """Rows · query heads a KV head in a tile; a power of two."""
    splits: int
    """Shares of a sequence's keys; a power of two."""


@dataclass(frozen=True, slots=True)
class CudaMeta:
    """What all layers of a pass read. Every tensor is a view of ``packed``."""

    packed: torch.Tensor
    """[bytes] uint8."""
    positions: torch.Tensor
    ancestors: torch.Tensor | None
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    launches: tuple[Launch, ...]

    @property
    def signature(self) -> Hashable:
        """Equal for passes that launch the same grids over the same memory layout."""
        grids = tuple((len(launch.tiles), launch.tile_m, launch.splits) for launch in self.launches)
        return len(self.slots), tuple(self.block_tables.shape), self.ancestors is not None, grids

    def refill(self, other: CudaMeta) -> None:
        """Takes over another pass's contents in place, for the replay of a graph captured with this object.

        Raises:
            ConfigError: the signatures differ.
        """
        if self.signature != other.signature:
            raise ConfigError(f"a pass of signature {other.signature} was given; expected {self.signature}")
        self.packed.copy_(other.packed, non_blocking=True)


class CudaAttention:
    """Attention in Triton for float32, bfloat16 and float16. Caches are [blocks, 16, kv heads, head dim].

    Args:
        spec: the model's heads.
        device: where the caches lie; compute capability 8.0 or newer.
        dtype: the caches'.
        processors: multiprocessors to fill; None = the device's.

    Raises:
        ConfigError: Triton is not installed.
    """

    def __init__(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, processors: int | None = None
    ) -> None:
        self.spec = spec
        self._device = device
        self._kernels = _load_kernels()
        self._processors = processors or torch.cuda.get_device_properties(device).multi_processor_count
        self._group = spec.num_heads // spec.num_kv_heads
        self._padded_dim = max(16, _power_of_two(spec.head_dim))
        self._wide = dtype == torch.float32
        self._most_m, self._tile_n = _tile_limits(self._padded_dim, dtype)

    def kv_shape(self, num_blocks: int) -> tuple[Shape, Shape]:
        shape = (num_blocks, BLOCK_SIZE, self.spec.num_kv_heads, self.spec.head_dim)
        return shape, shape

    def move(self, kv: KV, source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``AttentionBackend.move``."""
        move_rows(kv, source, target)

    def prepare(self, batch: ForwardBatch) -> CudaMeta:
        rows = np.diff(batch.query_start)
        plans = self._plan(batch, rows)
        longest = int((batch.context_lens + rows).max(initial=1))
        width = min(_power_of_two(-(-longest // BLOCK_SIZE)), batch.block_tables.shape[1])
        shorts: tuple[npt.NDArray[Any], ...] = (
            batch.slots,
            batch.query_start,
            batch.context_lens,
            batch.block_tables[:, :width],
            *(plan.tiles for plan in plans),
        )
        arrays: list[npt.NDArray[Any]] = [batch.positions, *(array.astype(np.int32, copy=False) for array in shorts)]
        if batch.ancestors is not None:
            arrays.append(batch.ancestors)
        packed, views = _upload(arrays, self._device)
        launches = (Launch(t, p.tile_m, p.splits) for t, p in zip(views[5:], plans, strict=False))
        return CudaMeta(
            packed,
            positions=views[0],
            ancestors=views[-1] if batch.ancestors is not None else None,
            slots=views[1],
            query_start=views[2],
            context_lens=views[3],
            block_tables=views[4],
            launches=tuple(launches),
        )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: KV,
        meta: CudaMeta,
        window: int | None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        self._write(k, v, kv, meta)
        out = q.new_empty(q.shape[0], self.spec.num_heads * self.spec.head_dim)
        for launch in meta.launches:
            self._launch(launch, out, q, k, v, kv, meta, window)
        return out

    def _plan(self, batch: ForwardBatch, rows: Int32) -> list[_Plan]:
        """One launch for sequences with few rows, whose tiles are small, and one for all others."""
        few = rows * self._group <= FEW_ROWS_M
        return [
            self._plan_launch(batch, rows, members)
            for members in (np.flatnonzero(few), np.flatnonzero(~few))
            if len(members)
        ]

    def _plan_launch(self, batch: ForwardBatch, rows: Int32, members: npt.NDArray[np.intp]) -> _Plan:
        lens = rows[members]
        wanted = _power_of_two(max(1, int(lens.max())) * self._group)
        tile_m = max(16, min(wanted, self._most_m), _power_of_two(self._group))
        tiles = _tile_table(batch.query_start, members, lens, tile_m // self._group)
        longest = int((batch.context_lens[members] + lens).max())
        programs = len(tiles) * self.spec.num_kv_heads
        room = self._processors * PROGRAMS_PER_PROCESSOR // programs
        splits = max(1, min(room, longest // KEYS_PER_SPLIT, MAX_SPLITS))
        return _Plan(tiles, tile_m, 1 << (splits.bit_length() - 1))

    def _write(self, k: torch.Tensor, v: torch.Tensor, kv: KV, meta: CudaMeta) -> None:
        width = self.spec.num_kv_heads * self.spec.head_dim
        self._kernels.write_kv[(len(meta.slots), -(-width // COPY_TILE))](
            *kv,
            k,
            v,
            meta.slots,
            *k.stride()[:2],
            *v.stride()[:2],
            HEADS_KV=self.spec.num_kv_heads,
            HEAD_DIM=self.spec.head_dim,
            TILE=min(COPY_TILE, _power_of_two(width)),
        )

    def _warps(self, tile_m: int) -> int:
        """As many as keep the accumulators in registers."""
        return 8 if self._wide or tile_m * self._padded_dim >= 8192 else 4

    def _launch(
        self,
        launch: Launch,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: KV,
        meta: CudaMeta,
        window: int | None,
    ) -> None:
        heads = self.spec.num_kv_heads
        cells = (len(launch.tiles), heads, launch.splits, launch.tile_m)
        split = launch.splits > 1
        partial = torch.empty(*cells, self.spec.head_dim, device=q.device) if split else out
        partial_lse = torch.empty(cells, device=q.device) if split else out
        shape: dict[str, Any] = {
            "HEADS_KV": heads,
            "GROUP": self._group,
            "HEAD_DIM": self.spec.head_dim,
            "PADDED_DIM": self._padded_dim,
            "TILE_M": launch.tile_m,
            "SPLITS": launch.splits,
        }
        self._kernels.attend_paged[cells[:3]](
            out,
            partial,
            partial_lse,
            q,
            k,
            v,
            *kv,
            launch.tiles,
            meta.query_start,
            meta.context_lens,
            meta.slots,
            meta.positions,
            meta.positions if meta.ancestors is None else meta.ancestors,
            meta.block_tables,
            meta.block_tables.shape[1],
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            self.spec.scale,
            BLOCK=BLOCK_SIZE,
            TILE_N=self._tile_n,
            WINDOW=window or 0,
            SOFTCAP=self.spec.softcap or 0.0,
            HIDDEN_KEYS=self.spec.hidden_keys,
            TREE=meta.ancestors is not None,
            num_warps=self._warps(launch.tile_m),
            num_stages=3,
            **shape,
        )
        if split:
            grid = (cells[0], heads, launch.tile_m // self._group * self._group)
            self._kernels.merge_splits[grid](
                out, partial, partial_lse, launch.tiles, meta.query_start, **shape, num_warps=4
            )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A launch before its tiles are on the device."""

    tiles: Int32
    tile_m: int
    splits: int


def _load_kernels() -> Any:
    try:
        from dynaspec.model.kernels import triton_attention
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError("attention on CUDA needs the package triton, which is not installed") from error
    return triton_attention


def _tile_table(query_start: Int32, members: npt.NDArray[np.intp], rows: Int32, rows_per_tile: int) -> Int32:
    """[T, 2] sequence and first row. A sequence without rows keeps an empty tile, which keeps T static."""
    count = np.maximum(-(-rows // rows_per_tile), 1)
    sequence = np.repeat(members, count)
    rank = np.arange(len(sequence)) - np.repeat(np.cumsum(count) - count, count)
    tiles = np.stack([sequence, query_start[sequence] + rank * rows_per_tile], axis=1).astype(np.int32)
    tiles[np.repeat(rows == 0, count), 0] = -1
    return tiles


def _upload(arrays: list[npt.NDArray[Any]], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copies all arrays at once. PyTorch's host allocator keeps the pinned memory until the copy has run."""
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    starts = [0, *ends[:-1]]
    staging = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staging.numpy()
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    packed = staging.to(device, non_blocking=True)
    return packed, [
        packed[start : start + array.nbytes].view(_DTYPES[array.dtype.itemsize]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


_DTYPES = {4: torch.int32, 8: torch.int64}


def _tile_limits(padded_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Most rows · heads and keys in a tile: about the largest that Ampere and Hopper hold in registers."""
    if dtype == torch.float32:
        return 32, 16
    return (128, 64) if padded_dim <= 128 else (64, 32)


def _power_of_two(value: int) -> int:
    """The smallest power of two ≥ value."""
    return 1 << (value - 1).bit_length()
