"""Loads what is compiled for drafting on CPU, or the first drafts would take five times as long as the next ones."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.proposer import Ints
from dynaspec.contract.step import SpecPlan, StopRule, TreeRule
from dynaspec.sampling import ops

from .drawing import Choices, FirstChoices
from .growth import Growth, add_nodes, as_drafts, grow, next_parents, parent_rows, paths
from .guard import nonsense
from .ngram import NgramProposer, gather_signal
from .router import Part, came_true
from .stopping import stop_mask
from .watermark import move_marks, slots_before, unread_rows

_SURVIVAL = StopRule(below=(0.5,), signal="survival", bias=(0.0,), offset=(0.0,))


@cache
def load_kernels() -> None:
    """Once a process: what a model lacks is read, it drafts by either kind of rule, first choices and drawn ones; and
    lookups of n-grams."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    batch = Part(("",), zero, 4 * one, tokens=np.zeros((1, 8), np.int32), block_tables=np.zeros((1, 1), np.int32))
    unread_rows(batch.tokens, batch.block_tables, 1, zero, 4 * one, zero, zero, 1)
    slots_before(batch.block_tables, 1, zero, one)
    move_marks(zero.copy(), zero.copy(), zero.copy(), zero.copy(), zero, one, 1)
    for rule in (StopRule(below=(0.5,)), _SURVIVAL):
        FirstChoices(batch, zero, one, rule).take(torch.zeros(1, 2), zero, 1)
        stop_mask(rule, one, torch.device("cpu")).update(1, zero, torch.ones(1))
    column = np.zeros((1, 1), np.float32)
    text = batch.tokens, zero, batch.lengths, np.zeros((1, 1), np.int64), zero
    gather_signal(column[0], column[0], *text, 0, column, column.copy())
    lookup = NgramProposer(1, 2)
    came_true((lookup.peek(batch),), batch.tokens, zero, zero, one)
    plan = SpecPlan(step=0, depth=(1,), proposer=(0,), nodes=(1,))
    drafts = lookup.propose(batch, plan)
    nonsense(drafts, plan, vocab_size=2)
    drafts.parents = np.full(drafts.tokens.shape, -1)
    nonsense(drafts, plan, vocab_size=2)
    growth, first = grow(batch, zero, one, one, TreeRule(1), _SURVIVAL), np.zeros((1, 1), np.int64)
    paths(growth, zero, zero - 1)
    add_nodes(growth, zero, zero - 1, first, np.ones((1, 1), np.float32))
    next_parents(growth, 1)
    parent_rows(growth, zero, zero, batch.block_tables, 1)
    as_drafts(growth, zero, plan)
    ops.top(torch.zeros(1, 2), 1)


def no_growth() -> tuple[npt.NDArray[np.int32], int, Ints, int, Ints, Ints, Ints, Growth]:
    """Arguments of a ``chain.Tree``, likewise."""
    none, one = np.zeros(0, np.int64), np.ones(1, np.int64)
    tables = np.zeros((1, 1), np.int32)
    batch = Part(("",), 0 * one, 4 * one, tokens=np.zeros((1, 8), np.int32), block_tables=tables)
    return tables, 1, 0 * one, 1, 4 * one, none, none, grow(batch, none, one[:0], one[:0], TreeRule(1), _SURVIVAL)


def nobody() -> tuple[npt.NDArray[np.int32], Ints, npt.NDArray[np.int32], int, Ints, int, Choices]:
    """Arguments of a ``chain.Chain`` that drafts for no request: it loads what is compiled, or compiles it."""
    none, one = np.zeros(0, np.int64), np.ones(1, np.int64)
    tables = np.zeros((1, 1), np.int32)
    batch = Part(("",), 0 * one, 4 * one, tokens=np.zeros((1, 8), np.int32), block_tables=tables)
    return batch.tokens, batch.lengths, tables, 1, 0 * one, 1, FirstChoices(batch, none, none, _SURVIVAL).choices
