"""Loads what is compiled for a step on CPU, drafting and the model apart, or the first requests would wait for it."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from dynaspec.sampling import ops
from dynaspec.sampling.rng import row_keys, uniforms
from dynaspec.verify.chain import accept_first
from dynaspec.verify.tree import walk

from .layout import fill_layout, grow_rows


@cache
def load_kernels() -> None:
    """Once a process: a pass is laid out, its tokens are drawn, freely and from a grammar's, and a chain's and a tree's
    are verified."""
    zero, one, root = np.zeros(1, np.int64), np.ones(1, np.int64), np.full((1, 1), -1)
    text, table = np.zeros((1, 2), np.int32), np.zeros((1, 1), np.int32)
    fill_layout(text, table, 2, zero, one, root, zero, np.zeros((0, 5), np.int64))
    scores, half = torch.zeros(1, 2), np.full(1, 0.5)
    ops.truncate(scores, zero, half.astype(np.float32), half, one, half)
    ops.keep_set(scores, zero, table)
    ops.empty(scores, zero)
    keys = row_keys(np.zeros(1, np.uint64), zero, zero, zero)
    uniforms(keys)
    ops.race(ops.softmax(scores, zero), keys)
    accept_first(zero, zero, zero, root, zero)
    grow_rows(zero.copy(), zero, zero, root, root, zero, 1)
    walk(zero, np.zeros(1, np.bool_), zero, root, root, zero, 1)
