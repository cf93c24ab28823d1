"""Loads what is compiled for drafting on CPU, or the first drafts would take five times as long as the next ones."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from dynaspec.contract.step import SpecPlan, StopRule

from .first_choice import FirstChoices
from .ngram import NgramProposer
from .router import Part
from .stopping import stop_mask

_SURVIVAL = StopRule(below=(0.5,), signal="survival", bias=(0.0,), offset=(0.0,))


@cache
def load_kernels() -> None:
    """Once a process: drafts by either kind of rule, first choices and drawn ones, and a look-up."""
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    batch = Part(("",), zero, 4 * one, tokens=np.zeros((1, 8), np.int32), block_tables=np.zeros((1, 1), np.int32))
    for rule in (StopRule(below=(0.5,)), _SURVIVAL):
        FirstChoices(batch, zero, one, rule).take(torch.zeros(1, 2), zero, 1)
        stop_mask(rule, one, torch.device("cpu")).update(1, zero, torch.ones(1))
    lookup = NgramProposer(1, 2)
    lookup.peek(batch)
    lookup.propose(batch, SpecPlan(step=0, depth=(1,), proposer=(0,), nodes=(1,)))
