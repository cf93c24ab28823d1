"""Paged attention in plain PyTorch: any device and dtype, one sequence at a time. The ground truth of the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch

from .base import KV, AttentionSpec, Shape, move_rows


@dataclass(slots=True)
class ReferenceMeta:
    positions: torch.Tensor
    slots: torch.Tensor
    batch: ForwardBatch


class ReferenceAttention:
    """Blocks are [16, kv heads, head_dim] for keys and values alike."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device

    def kv_shape(self, num_blocks: int) -> tuple[Shape, Shape]:
        shape = (num_blocks, BLOCK_SIZE, self.spec.num_kv_heads, self.spec.head_dim)
        return shape, shape

    def move(self, kv: KV, source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``AttentionBackend.move``."""
        move_rows(kv, source, target)

    def prepare(self, batch: ForwardBatch) -> ReferenceMeta:
        positions, slots = (torch.from_numpy(column).to(self._device) for column in (batch.positions, batch.slots))
        return ReferenceMeta(positions, slots, batch)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KV, meta: ReferenceMeta, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``. Scores and softmax are float32."""
        batch = meta.batch
        self._write(k, v, kv, batch)
        out = torch.zeros(q.shape[0], self.spec.num_heads, self.spec.head_dim, dtype=q.dtype, device=q.device)
        for s in range(batch.sequences):
            begin, end = int(batch.query_start[s]), int(batch.query_start[s + 1])
            visible = self._visible(batch, s, window)
            for row in range(begin, end):
                index = visible[row - begin].nonzero()[:, 0]
                if len(index):
                    out[row] = self._attend_row(q[row], index, batch.block_tables[s], kv)
        return out.flatten(1)

    @staticmethod
    def _write(k: torch.Tensor, v: torch.Tensor, kv: KV, batch: ForwardBatch) -> None:
        slots = torch.from_numpy(batch.slots).to(k.device)
        kept = slots >= 0
        block, offset = slots[kept] // BLOCK_SIZE, slots[kept] % BLOCK_SIZE
        kv[0][block, offset] = k[kept]
        kv[1][block, offset] = v[kept]

    def _visible(self, batch: ForwardBatch, s: int, window: int | None) -> torch.Tensor:
        """[rows, context + rows] which key each row of sequence s sees."""
        begin, end = int(batch.query_start[s]), int(batch.query_start[s + 1])
        context, rows = int(batch.context_lens[s]), end - begin
        row = torch.arange(rows)
        among = row[None, :] <= row[:, None]
        if batch.ancestors is not None:
            bits = torch.from_numpy(batch.ancestors[begin:end])[:, None]
            among &= (bits == -1) | ((bits >> row.clamp(max=63)[None, :]) & 1 == 1)
        among = among & (torch.from_numpy(batch.slots[begin:end]) >= 0)[None, :]
        visible = torch.cat([torch.ones(rows, context, dtype=torch.bool), among], 1)
        visible[:, : self.spec.hidden_keys] = False
        if window is not None:
            positions = torch.from_numpy(batch.positions[begin:end])
            keys = torch.cat([torch.arange(context), positions])
            visible &= keys[None, :] > positions[:, None] - window
        return visible

    def _attend_row(self, q: torch.Tensor, index: torch.Tensor, table: object, kv: KV) -> torch.Tensor:
        """q [heads, head_dim] against the keys at ``index`` of one sequence."""
        spec = self.spec
        block = torch.as_tensor(table).to(torch.int64)[index // BLOCK_SIZE].to(q.device)
        offset = (index % BLOCK_SIZE).to(q.device)
        group = spec.num_heads // spec.num_kv_heads
        keys, values = (cache[block, offset].repeat_interleave(group, 1).float() for cache in kv)
        scores = torch.einsum("hd,khd->hk", q.float(), keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        return torch.einsum("hk,khd->hd", scores.softmax(-1), values).to(q.dtype)
