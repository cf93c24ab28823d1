"""All that compiled code needs to run an EAGLE-3 head by itself on CPU in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dynaspec.model.attention.base import AttentionSpec
from dynaspec.model.compiled import CompiledDecoder, Int64
from dynaspec.model.cpu_stack import CpuStack, matrix_row, norm_row
from dynaspec.model.layer import Weights

from .config import Eagle3Config

if TYPE_CHECKING:
    from .head import HeadWeights


class CompiledHead(NamedTuple):
    """For ``kernels.eagle3``. Whoever keeps it keeps the head, too: it has the addresses of its weights."""

    decoder: CompiledDecoder
    entrance: Int64
    """[NORMS + …] fusion matrix, norm of the hidden state, norm of all states, norms of single ones; see
    ``kernels.eagle3``."""
    target_hidden: int
    norm_before_residual: bool
    norm_output: bool
    vocabulary: Int64
    """[draft vocabulary] the target's ids; empty where they are the same."""


def compile_head(config: Eagle3Config, weights: HeadWeights, spec: AttentionSpec) -> CompiledHead:
    """The head that these weights are of, for compiled code."""
    stack = CpuStack(config.decoder, weights.layers, spec, torch.get_num_threads())
    decoder = Weights(weights.embedding, None, weights.layers, weights.final_norm, weights.head)
    entrance = [
        *((0, 0, 0, 0) if weights.fusion is None else matrix_row(weights.fusion)),
        *norm_row(weights.hidden_norm),
        *norm_row(weights.input_norm),
        *(number for norm in weights.state_norms for number in norm_row(norm)),
    ]
    none = np.empty(0, np.int64)
    return CompiledHead(
        stack.compiled(config.decoder, decoder),
        np.array(entrance, np.int64),
        config.target_hidden,
        config.norm_before_residual,
        config.norm_output,
        none if weights.vocabulary is None else weights.vocabulary,
    )
