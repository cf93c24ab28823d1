"""All that compiled code needs to run passes of a decoder by itself, without returning to Python between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .attention.base import KV

Floats = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.int64] | npt.NDArray[np.uint64]
"""Of caches: int64 where they are float32, uint64 where they are bfloat16. Compiled code is made for either."""


class CompiledDecoder(NamedTuple):
    """A decoder on CPU in float32 as ``kernels.decode`` runs it. Whoever keeps it keeps the decoder, too: it has the
    addresses of its weights."""

    embedding: Floats
    """[vocabulary, hidden]"""
    embedding_scale: np.float32
    position_embedding: Floats
    """[positions, hidden]; no rows = none"""
    layers: Int64
    """[layers, …] see ``kernels.decode.run_layers``."""
    ends: Int64
    """[6] the final norm and the head, see ``kernels.decode``."""
    heads: tuple[int, int, int]
    """Heads, KV heads, dimensions of a head."""
    is_gated: bool
    activation: int
    parallel: bool
    eps: float
    cos: Floats
    sin: Floats
    interleaved: bool
    scale: float
    softcap: float
    threads: int
    attention_work: int
    """See ``kernels.attention_work.plan_work``."""
    final_eps: float
    logits_softcap: float
    """0 = none"""


class NoTaps(NamedTuple):
    """Arguments of a compiled pass of which no hidden states are kept."""

    arena: Floats = np.empty((0, 0), np.float32)
    columns: Int64 = np.empty(0, np.int64)


NO_TAPS = NoTaps()


class CacheAddresses:
    """Where the key and the value cache of each layer are; worked out once for caches that are the same ones pass after
    pass."""

    def __init__(self) -> None:
        self._kv: Sequence[KV] = ()
        self._found: Addresses = np.empty((0, 2), np.int64)

    def of(self, kv: Sequence[KV]) -> Addresses:
        """[layers, 2]"""
        if kv is not self._kv:
            dtype: Any = np.int64
            if kv[0][0].dtype == torch.bfloat16:
                from .kernels.paged_attention import load_bfloat16  # it compiles its kernels when it is imported

                load_bfloat16()
                dtype = np.uint64
            self._found = np.array([[key.data_ptr(), value.data_ptr()] for key, value in kv], dtype)
            self._kv = kv
        return self._found
