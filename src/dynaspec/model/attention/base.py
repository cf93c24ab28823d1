"""What the decoder asks of paged attention, whatever the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dynaspec.model.batch import ForwardBatch

Shape = tuple[int, ...]
KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What all layers of a model share. The KV cache lies on the model's device and has its dtype, or bfloat16."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q·k."""
    softcap: float | None = None
    """Scores become cap · tanh(score / cap) before masking (Gemma 2)."""
    hidden_keys: int = 0
    """KV entries at the beginning of every sequence that no row sees (EAGLE: a text's first token has none)."""


def move_rows(kv: KV, source: torch.Tensor, target: torch.Tensor) -> None:
    """``AttentionBackend.move`` for caches [blocks, BLOCK_SIZE, …]."""
    for cache in kv:
        rows = cache.flatten(0, 1)
        rows[target] = rows[source]


class AttentionMeta(Protocol):
    """What a backend works out once a pass and every layer uses."""

    @property
    def positions(self) -> torch.Tensor:
        """[R] int64 on the backend's device: ``ForwardBatch.positions``."""
        ...

    @property
    def slots(self) -> torch.Tensor:
        """[R] integers on the backend's device: ``ForwardBatch.slots``."""
        ...


class AttentionBackend(Protocol):
    """Writes the keys and values of a pass into the paged cache, then attends.

    Visibility is that of ``ForwardBatch``. A sliding window of w further hides every key whose position is
    ≤ the row's position − w. A key of the pass has the position of its row; a key of the context has its index in
    the sequence. What is not visible is never read into a result, were it NaN. A row that sees nothing yields
    finite values.
    """

    spec: AttentionSpec

    def kv_shape(self, num_blocks: int) -> tuple[Shape, Shape]:
        """Shapes of the key and of the value cache of one layer."""
        ...

    def move(self, kv: KV, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values of one layer between slots: ``source`` [n] → ``target`` [n], int64 on the caches'
        device. All are read before any is written."""
        ...

    def prepare(self, batch: ForwardBatch) -> AttentionMeta:
        """Once a pass, before its first layer."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: KV,
        meta: Any,
        window: int | None,
    ) -> torch.Tensor:
        """One layer. Rotary embeddings have been applied already.

        Args:
            q: [R, num_heads, head_dim]; like ``k`` and ``v`` a view whose last dimension is contiguous.
            k: [R, num_kv_heads, head_dim].
            v: [R, num_kv_heads, head_dim].
            kv: the layer's caches, written at ``slots``.
            meta: from ``prepare`` of the same backend.
            window: keys a row may look back on, itself included; None = all.

        Returns:
            [R, num_heads · head_dim], contiguous.
        """
        ...


def bytes_per_block(attention: AttentionBackend, layers: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over so many layers, in a dtype."""
    return layers * sum(torch.Size(shape).numel() for shape in attention.kv_shape(1)) * dtype.itemsize
