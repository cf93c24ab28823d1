"""A head: a pass takes tokens with the hidden state before each, and gives the next hidden states.

The row of token t_j goes with the target's hidden states at t_{j−1}; of a drafted token, with what the head's own pass
over the token before has given. So a text's first token has no row: its KV entry is never seen
(``AttentionSpec.hidden_keys``), and every entry hangs on tokens up to its own only, as a draft model's does.

Embedding and hidden state enter side by side: through a projection to the head's width (EAGLE-1, MTP), or as they are
into the first layer's queries, keys and values (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from dynaspec.model.attention import attention_backend
from dynaspec.model.attention.base import KV, AttentionSpec, Shape, bytes_per_block
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.compiled import CacheAddresses
from dynaspec.model.decoder import Layer, Model, OpsStack, ops_for
from dynaspec.model.linear import Linear
from dynaspec.model.ops import Norm, Ops

from .config import FIRST_POSITION, HeadConfig

if TYPE_CHECKING:
    from dynaspec.model.kernels.decoder_heads import CompiledHead


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Ready to run. None = there is no such part."""

    embedding: torch.Tensor
    """[target's vocabulary, hidden]"""
    layers: tuple[Layer, ...]
    """The first has no ``attention_norm`` where it reads embedding and hidden state side by side, and in EAGLE-1."""
    head: Linear
    """→ [R, draft vocabulary]"""
    fusion: Linear | None = None
    """The target's states side by side → [R, hidden]."""
    state_norms: tuple[Norm, ...] = ()
    """Of each of the target's states, before the fusion; empty = none."""
    input_norm: Norm | None = None
    """Of all of them together."""
    hidden_norm: Norm | None = None
    embedding_norm: Norm | None = None
    projection: Linear | None = None
    """[R, 2 hidden] → [R, hidden]"""
    final_norm: Norm | None = None
    vocabulary: npt.NDArray[np.int64] | None = None
    """[draft vocabulary] the target's ids; None where they are the same."""


class Head:
    """The head as drafting sees it. It keeps the target alive, whose embedding it may share."""

    def __init__(self, config: HeadConfig, weights: HeadWeights, target: Model) -> None:
        self.config = config.decoder
        self.settings = config
        self.device, self.dtype = target.device, target.dtype
        self.vocabulary = weights.vocabulary
        """See ``HeadWeights``."""
        decoder = config.decoder
        spec = AttentionSpec(
            *(decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, decoder.head_dim**-0.5),
            hidden_keys=FIRST_POSITION,
        )
        self._attention = attention_backend(spec, self.device, self.dtype)
        self._ops: Ops = ops_for(self.device)
        self._stack = OpsStack(decoder, weights.layers, self._attention, self._ops, self.device)
        self._weights = weights
        self._target = target
        self._caches = CacheAddresses()
        self.compiled: CompiledHead | None = None
        if self.device.type == "cpu" and self.dtype == torch.float32:
            self.compiled = _compile(config, weights, spec)
        self.kv_bytes_per_block = bytes_per_block(self._attention, decoder.num_layers, self.dtype)

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]:
        """See ``Model``."""
        return self._attention.kv_shape(num_blocks)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [R, states · width], which may be overwritten → [R, hidden]."""
        weights = self._weights
        if self.compiled is not None:
            return torch.from_numpy(kernels().fuse(self.compiled, states.numpy()))
        if weights.state_norms:
            parts = torch.split(states, self.settings.target_hidden, 1)
            normed = [
                self._ops.norm(part.contiguous(), norm) for part, norm in zip(parts, weights.state_norms, strict=True)
            ]
            states = torch.cat(normed, 1)
        if weights.input_norm is not None:
            states = self._ops.norm(states, weights.input_norm)
        return states if weights.fusion is None else weights.fusion(states)

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor, kv: Sequence[KV]) -> torch.Tensor:
        """One pass; writes the rows' KV.

        Args:
            batch: the rows, whose context begins with a text's first token.
            hidden: [R, hidden] the state before each: from ``fuse``, or what a pass has returned.

        Returns:
            [R, hidden] without the rows of ``batch.kv_only``
        """
        if self.compiled is not None:
            caches, blocks = self._caches.of(kv), kv[0][0].shape[0]
            rows = kernels().PassRows.of(batch)
            return torch.from_numpy(kernels().head_pass(self.compiled, caches, blocks, rows, hidden.numpy()))
        weights, layers = self._weights, self._weights.layers
        meta = self._attention.prepare(batch)
        embedded = F.embedding(batch.tokens, weights.embedding)
        if self.settings.zero_first:
            embedded = embedded.masked_fill((meta.positions == FIRST_POSITION)[:, None], 0.0)
        if weights.embedding_norm is not None:
            embedded = self._ops.norm(embedded, weights.embedding_norm)
        normed = hidden if weights.hidden_norm is None else self._ops.norm(hidden.contiguous(), weights.hidden_norm)
        both = torch.cat([normed, embedded] if self.settings.hidden_first else [embedded, normed], 1)
        if weights.projection is None:
            x = (normed if self.settings.norm_before_residual else hidden).clone()
            delta, done = self._stack.after_norm(layers[0], x, both, kv[0], meta), 1
        else:
            x = weights.projection(both).contiguous()
            delta, done = torch.zeros_like(x), 0
        delta = self._stack.run(x, delta, range(done, len(layers)), kv, meta)
        if self.settings.norm_output and weights.final_norm is not None:
            return batch.without_kv_only(self._ops.add_norm(x, delta, weights.final_norm))
        return batch.without_kv_only(x + delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a pass has returned [r, hidden] → logits [r, draft vocabulary], float32."""
        if self.compiled is not None:
            return torch.from_numpy(kernels().head_logits(self.compiled, hidden.numpy()))
        if self._weights.final_norm is not None and not self.settings.norm_output:
            hidden = self._ops.norm(hidden, self._weights.final_norm)
        return self._weights.head(hidden).float()


class TimedHead:
    """A head as ``propose.pass_timing`` times it: passes over whatever states."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.config, self.device, self.compiled = head.config, head.device, head.compiled

    def forward(self, batch: ForwardBatch, kv: Sequence[KV]) -> torch.Tensor:
        """[R, hidden]"""
        hidden = torch.zeros(batch.rows, self.config.hidden_size, dtype=self._head.dtype, device=self.device)
        return self._head.forward(batch, hidden, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self._head.logits(hidden)

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """See ``Model``."""
        for _ in range(passes):
            self.logits(self.forward(batch, kv))


def kernels() -> Any:
    """``kernels.decoder_heads``, which compiles what it calls when it is imported: only where a head runs on CPU."""
    from dynaspec.model.kernels import decoder_heads

    return decoder_heads


def _compile(config: HeadConfig, weights: HeadWeights, spec: AttentionSpec) -> CompiledHead:
    """The head that these weights are of, for compiled code."""
    from dynaspec.model.cpu_decoder import compile_decoder, matrix_row, norm_row
    from dynaspec.model.kernels.decode import MATRIX
    from dynaspec.model.kernels.decoder_heads import CompiledHead

    none = (0,) * MATRIX
    ends = weights.embedding, weights.head, weights.final_norm
    entrance = [
        *(none if weights.fusion is None else matrix_row(weights.fusion)),
        *(none if weights.projection is None else matrix_row(weights.projection)),
        *norm_row(weights.hidden_norm),
        *norm_row(weights.embedding_norm),
        *norm_row(weights.input_norm),
        *(number for norm in weights.state_norms for number in norm_row(norm)),
    ]
    return CompiledHead(
        compile_decoder(config.decoder, weights.layers, spec, *ends),
        np.array(entrance, np.int64),
        config.target_hidden,
        config.hidden_first,
        config.zero_first,
        config.norm_before_residual,
        config.norm_output,
    )
