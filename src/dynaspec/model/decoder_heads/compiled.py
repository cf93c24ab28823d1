"""All that compiled code needs to run a head by itself on CPU in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dynaspec.model.attention.base import AttentionSpec
from dynaspec.model.compiled import CompiledDecoder, Int64
from dynaspec.model.cpu_decoder import compile_decoder, matrix_row, norm_row
from dynaspec.model.kernels.layers import MATRIX
from dynaspec.model.linear import Linear

from .config import HeadConfig

if TYPE_CHECKING:
    from .head import HeadWeights


class CompiledHead(NamedTuple):
    """For ``kernels.decoder_heads``. Whoever keeps it keeps the head, too: it has the addresses of its weights."""

    decoder: CompiledDecoder
    entrance: Int64
    """[STATE_NORMS + …] fusion matrix, projection, norms of the hidden state, of the embedding, of all states, and of
    single ones; see ``kernels.decoder_heads``."""
    target_hidden: int
    hidden_first: bool
    zero_first: bool
    norm_before_residual: bool
    norm_output: bool


def compile_head(config: HeadConfig, weights: HeadWeights, spec: AttentionSpec) -> CompiledHead:
    """The head that these weights are of, for compiled code."""
    ends = weights.embedding, weights.head, weights.final_norm
    entrance = [
        *_matrix(weights.fusion),
        *_matrix(weights.projection),
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


def _matrix(linear: Linear | None) -> tuple[int, ...]:
    """As ``matrix_row``; None = none."""
    return (0,) * MATRIX if linear is None else matrix_row(linear)
