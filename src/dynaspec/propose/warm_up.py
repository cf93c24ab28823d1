"""Loads what is compiled for drafting on CPU, or the first drafts would take five times as long as the next ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from dynaspec.contract.proposer import Ints
from dynaspec.contract.step import LOGIT_RANGE, SpecPlan, StopRule
from dynaspec.model.compiled import CompiledDecoder

from .check import nonsense
from .drawing import REPEAT_MATCH, REPEAT_WEIGHT
from .first_choice import FirstChoices
from .match import gather_signal
from .ngram import NgramProposer
from .router import Part
from .stopping import stop_mask
from .unread import unread_rows
from .watermark import move_marks

Chain = Callable[..., tuple[Ints, Ints, Ints]]
_SURVIVAL = StopRule(below=(0.5,), signal="survival", bias=(0.0,), offset=(0.0,))


@cache
def load_kernels() -> None:
    """Once a process: what a model lacks is read, it drafts by either kind of rule, first choices and drawn ones; and a
    look-up."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    batch = Part(("",), zero, 4 * one, tokens=np.zeros((1, 8), np.int32), block_tables=np.zeros((1, 1), np.int32))
    unread_rows(batch.tokens, batch.block_tables, 1, zero, 4 * one, zero, zero, 1)
    move_marks(zero.copy(), zero.copy(), zero.copy(), zero.copy(), zero, one, 1)
    for rule in (StopRule(below=(0.5,)), _SURVIVAL):
        FirstChoices(batch, zero, one, rule).take(torch.zeros(1, 2), zero, 1)
        stop_mask(rule, one, torch.device("cpu")).update(1, zero, torch.ones(1))
    column = np.zeros((1, 1), np.float32)
    text = batch.tokens, zero, batch.lengths, np.zeros((1, 1), np.int64), zero
    gather_signal(column[0], column[0], LOGIT_RANGE, *text, 0, REPEAT_MATCH, REPEAT_WEIGHT, column, column.copy())
    lookup = NgramProposer(1, 2)
    lookup.peek(batch)
    drafts = lookup.propose(batch, SpecPlan(step=0, depth=(1,), proposer=(0,), nodes=(1,)))
    nonsense(drafts, one, vocab_size=2)


@cache
def load_chain() -> Chain:
    """``chain.draft_chain``, loaded. It is imported only where a model drafts on CPU: it compiles what it calls."""
    from dynaspec.model.kernels.decode import FINAL_NORM
    from dynaspec.model.kernels.elementwise import SILU
    from dynaspec.model.kernels.layers import HIDDEN_KEYS, NORM

    from .chain import draft_chain

    nothing = CompiledDecoder(
        embedding=np.zeros((1, 1), np.float32),
        embedding_scale=np.float32(1.0),
        position_embedding=np.zeros((0, 1), np.float32),
        layers=np.zeros((0, HIDDEN_KEYS + 1), np.int64),
        ends=np.zeros(FINAL_NORM + NORM, np.int64),
        heads=(1, 1, 1),
        is_gated=True,
        activation=SILU,
        parallel=False,
        eps=1e-6,
        cos=np.zeros((1, 0), np.float32),
        sin=np.zeros((1, 0), np.float32),
        interleaved=False,
        scale=1.0,
        softcap=0.0,
        threads=1,
        attention_work=1,
        final_eps=1e-6,
        logits_softcap=0.0,
    )
    none, one = np.zeros(0, np.int64), np.ones(1, np.int64)
    tables = np.zeros((1, 1), np.int32)
    batch = Part(("",), 0 * one, 4 * one, tokens=np.zeros((1, 8), np.int32), block_tables=tables)
    nobody = FirstChoices(batch, none, none, _SURVIVAL).choices
    draft_chain(nothing, np.zeros((0, 2), np.int64), 0, tables, 1, 0 * one, 1, nobody)
    chain: Chain = draft_chain
    return chain
