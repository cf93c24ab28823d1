"""What a proposer's drafts must be like to be verified."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import kernel
from dynaspec.contract.errors import ProposerFault
from dynaspec.contract.proposer import Drafts, Ints
from dynaspec.contract.step import SpecPlan

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

_NO_SIGNAL: Floats = np.zeros((0, 0), np.float32)


def nonsense(drafts: Drafts, plan: SpecPlan, vocab_size: int) -> Bools:
    """[B] which rows cannot be verified.

    Args:
        plan: what was asked for.

    Raises:
        ProposerFault: the answer as a whole has the wrong form.
    """
    depth, nodes = np.array(plan.depth, dtype=np.int64), np.array(plan.nodes, dtype=np.int64)
    _check_form(drafts, nodes if drafts.parents is not None else depth, vocab_size)
    tokens, lens = np.ascontiguousarray(drafts.tokens, np.int64), np.ascontiguousarray(drafts.lens, np.int64)
    signals = map(_signal, (drafts.confidence, drafts.signal, drafts.repeat_bonus))
    bad = unusable(tokens, lens, depth if drafts.parents is None else nodes, vocab_size, *signals)
    if drafts.parents is not None:
        bad |= misgrown(np.ascontiguousarray(drafts.parents, np.int64), np.where(bad, 0, lens), depth)
    if drafts.q is not None:
        request, slot = np.nonzero(np.arange(tokens.shape[1]) < np.where(bad, 0, lens)[:, None])
        drawn = drafts.q[request, slot, tokens[request, slot]]
        bad[request[~torch.isfinite(drawn).cpu().numpy()]] = True
    return bad


def _signal(column: Floats | None) -> Floats:
    return _NO_SIGNAL if column is None else np.ascontiguousarray(column, np.float32)


@kernel
def unusable(
    tokens: Ints,
    lens: Ints,
    depth: Ints,
    vocab_size: int,
    confidence: Floats,
    signal: Floats,
    repeat_bonus: Floats,
) -> Bools:
    """[B] drafts of another length than 0 … ``depth`` [B], or with a token or a signal that cannot be.

    Args:
        tokens: [B, K], of which ``lens`` [B] were drafted.
        confidence, signal, repeat_bonus: [B, K], or empty.
    """
    bad = (lens < 0) | (lens > depth)
    for r in range(lens.size):
        for j in range(min(lens[r], tokens.shape[1])):
            bad[r] |= tokens[r, j] < 0 or tokens[r, j] >= vocab_size
            bad[r] |= confidence.size > 0 and not np.isfinite(confidence[r, j])
            bad[r] |= signal.size > 0 and not np.isfinite(signal[r, j])
            bad[r] |= repeat_bonus.size > 0 and not np.isfinite(repeat_bonus[r, j])
    return bad


@kernel
def misgrown(parents: Ints, lens: Ints, depth: Ints) -> Bools:
    """[B] trees of ``lens`` [B] nodes with a parent that does not come before its child, or deeper than ``depth`` [B].

    Args:
        parents: [B, N]
    """
    bad, own = np.zeros(lens.size, np.bool_), np.zeros(parents.shape[1], np.int64)
    for r in range(lens.size):
        for j in range(lens[r]):
            above = parents[r, j]
            if above < -1 or above >= j:
                bad[r] = True
                break
            own[j] = 1 if above < 0 else own[above] + 1
            bad[r] |= own[j] > depth[r]
    return bad


def _check_form(drafts: Drafts, depth: npt.NDArray[np.int64], vocab_size: int) -> None:
    """
    Raises:
        ProposerFault: a column of another shape than the others, or of numbers that are not integers.
    """
    requests, width = len(depth), int(depth.max(initial=0))
    if drafts.tokens.ndim != 2 or drafts.tokens.shape[0] != requests or drafts.lens.shape != (requests,):
        raise ProposerFault(
            f"drafts have tokens {drafts.tokens.shape} and lens {drafts.lens.shape}; expected [{requests}, {width}] "
            f"and [{requests}]"
        )
    width = drafts.tokens.shape[1]
    if width < drafts.lens.max(initial=0):
        raise ProposerFault(f"a draft has {drafts.lens.max()} of {width} tokens; expected no more")
    if drafts.tokens.dtype.kind != "i" or drafts.lens.dtype.kind != "i":
        raise ProposerFault(
            f"drafts have tokens of {drafts.tokens.dtype} and lens of {drafts.lens.dtype}; expected int64"
        )
    counts = (*drafts.rows_per_pass, drafts.kv_skipped, drafts.kv_redone)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ProposerFault(f"drafts say that {counts} rows were processed, skipped and redone; expected integers")
    expected = {
        "confidence": (requests, width),
        "signal": (requests, width),
        "repeat_bonus": (requests, width),
        "parents": (requests, width),
        "early_exit": (requests,),
        "q": (requests, width, vocab_size),
    }
    if drafts.parents is not None and drafts.q is not None:
        raise ProposerFault("drafts have parents and q; expected trees of certain tokens")
    for name, shape in expected.items():
        column = getattr(drafts, name)
        if column is not None and tuple(column.shape) != shape:
            raise ProposerFault(f"drafts have {name} {tuple(column.shape)}; expected {shape}")
