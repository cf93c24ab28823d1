"""What the engine and the proposers see of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .attention.base import KV, Shape
from .batch import ForwardBatch
from .compiled import CompiledDecoder
from .config import DecoderConfig
from .linear import Linear
from .taps import Taps


class Model(Protocol):
    """A decoder that reads and writes a paged KV cache, which the caller owns."""

    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    """Of activations, and of the KV cache unless that is told otherwise."""
    product_dtype: torch.dtype
    """What the inputs and weights of matrix products are rounded to: ``dtype``, or bfloat16 where that is float32."""
    kv_bytes_per_block: int
    """Bytes of one KV block over all layers, in the model's dtype."""
    compiled: CompiledDecoder | None
    """The same model for compiled code; None where its passes have to be run from Python."""

    @property
    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden] of its tokens, in its dtype, before any scaling."""
        ...

    @property
    def head(self) -> Linear:
        """[R, hidden] after the final norm → [R, vocabulary], before any capping."""
        ...

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]:
        """Shapes of the key and of the value cache of one layer; their dtype is the model's, or bfloat16."""
        ...

    def forward(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor:
        """Runs all rows of the batch and writes their KV.

        Args:
            batch: the rows; token ids within the vocabulary, positions below ``config.max_position``.
            kv: key and value cache of every layer.
            taps: hidden states to keep at the rows' slots.

        Returns:
            [R, hidden] after the final norm, in the model's dtype.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [r, hidden] → logits [r, vocabulary], float32."""
        ...

    def move_kv(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies the KV of all layers from the slots ``source`` [n] to ``target`` [n], int64 on the model's device; all
        is read before anything is written."""
        ...

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """The same pass, with its logits, so many times, as those of a draft follow each other: to see what they take.

        Args:
            batch, kv: see ``forward``.
        """
        ...
