"""Verifying drafted chains so that the output keeps the target's own distribution.

Greedy and seeded requests: the target's token is drawn as in plain decoding, and drafted tokens are accepted for
as long as they are what the target draws. Others: rejection sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Drafts
from dynaspec.sampling import ops
from dynaspec.sampling.draw import draw
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.rows import Rows
from dynaspec.sampling.state import SamplerState

from .rejection import RejectionSampling

Bools = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a target pass emits for each of B requests: accepted drafts, then one token of the target's own."""

    accepted: Int64
    """[B] drafted tokens accepted."""
    tokens: Int64
    """[B, K + 1] the ``accepted + 1`` emitted tokens, zero-padded."""
    dead_end: Bools
    """[B] no token may follow the accepted ones: the one in ``tokens`` means nothing."""
    refused: Bools
    """[B] a grammar refused the draft that follows the accepted ones."""


def accept_chain(
    scores: torch.Tensor,
    rows: Rows,
    drafts: Drafts,
    lens: Int64,
    state: SamplerState,
    sampling: type[RejectionSampling] = RejectionSampling,
) -> Accepted:
    """Accepts a prefix of every drafted chain and draws the token that follows it.

    Args:
        scores: [R, V] the target's, from ``SamplerState.process``; a row of depth j tests the drafted x_{j+1}
        rows: for each of the B requests its depths 0 … ``lens``
        drafts: tokens [B, K]; q [B, K, V] defined for requests that are neither greedy nor seeded, or None where
            drafts are deterministic
        lens: [B] drafted tokens to verify, ≤ K
        state: the requests' parameters, not yet told of this step's tokens
        sampling: how requests that are neither greedy nor seeded are verified
    """
    if bool(state.greedy[rows.lanes].all()) and state.leaves_alone(rows.lanes):
        return _accept_first_choices(ops.to_host(ops.argmax(scores)), rows, drafts, lens)
    nothing = state.without_token(scores, rows)  # what is drawn there is no token
    drafted = rows.depth < lens[rows.request]
    tested = drafted & ~nothing
    following = padded(drafts)[rows.request, rows.depth]  # what a row tests, if it is one that does

    exact = state.exact(rows.lanes)
    if exact.all():
        drawn, _ = draw(scores, rows, state, Purpose.TARGET)
        own = ops.to_host(drawn)
        stop = first_failures(tested & (own == following), rows, drafts)
    else:
        own, passed = _draw_exact(scores, rows, np.flatnonzero(exact), following, state)
        rejection = sampling(scores, rows, np.flatnonzero(~exact), drafts.q, state)
        at = np.flatnonzero(tested & ~exact)
        passed[at] = rejection.accept(at, following[at])
        stop = first_failures(tested & passed, rows, drafts)
        ends = stop[~exact[stop]]
        rejected, bonus = ends[tested[ends]], ends[~tested[ends]]
        own[rejected] = rejection.replace(rejected, following[rejected])
        own[bonus] = rejection.draw(bonus)
    refused = drafted[stop] & state.grammars.refused(rows, stop, following[stop])
    return emit(stop, rows, drafts, own, nothing[stop], refused)


def _accept_first_choices(own: Int64, rows: Rows, drafts: Drafts, lens: Int64) -> Accepted:
    """Where every row has a token, the one with its largest logit: ``own`` [R]."""
    accepted, tokens = accept_first(own, rows.request, rows.depth, np.ascontiguousarray(drafts.tokens), lens)
    none = np.zeros(accepted.size, np.bool_)
    return Accepted(accepted, tokens, dead_end=none, refused=none)


@kernel
def accept_first(own: Int64, request: Int64, depth: Int64, drafts: Int64, lens: Int64) -> tuple[Int64, Int64]:
    """Accepts drafted tokens for as long as they are the rows' ``own`` [R].

    Args:
        request, depth: [R] see ``Rows``.
        drafts: [B, K], of which ``lens`` [B] are tested.

    Returns:
        ``Accepted.accepted`` and ``tokens``.
    """
    batch, width = drafts.shape
    row_of = np.zeros((batch, width + 1), np.int64)
    for row in range(own.size):
        row_of[request[row], depth[row]] = row
    accepted, tokens = np.zeros(batch, np.int64), np.zeros((batch, width + 1), np.int64)
    for b in range(batch):
        n = 0
        while n < lens[b] and own[row_of[b, n]] == drafts[b, n]:
            tokens[b, n] = drafts[b, n]
            n += 1
        accepted[b], tokens[b, n] = n, own[row_of[b, n]]
    return accepted, tokens


def first_failures(passed: Bools, rows: Rows, drafts: Drafts) -> Int64:
    """[B] the row that emits each request's own token: the first that did not pass its test, or has none.

    Args:
        passed: [R] rows whose drafted token is accepted if all before it are; false for rows that test nothing.
    """
    batch, width = drafts.tokens.shape
    row_of = np.zeros((batch, width + 1), np.int64)
    row_of[rows.request, rows.depth] = np.arange(rows.depth.size)
    goes_on = np.zeros((batch, width + 1), np.bool_)
    goes_on[rows.request, rows.depth] = passed
    stops: Int64 = row_of[np.arange(batch), goes_on.argmin(-1)]
    return stops


def emit(stop: Int64, rows: Rows, drafts: Drafts, own: Int64, dead_end: Bools, refused: Bools) -> Accepted:
    """The drafts before the rows ``stop`` [B], then those rows' ``own`` tokens ([R], defined there)."""
    accepted, tokens = rows.depth[stop], padded(drafts)
    tokens[np.arange(accepted.size), accepted] = own[stop]
    tokens[np.arange(tokens.shape[1]) > accepted[:, None]] = 0
    return Accepted(accepted, tokens, dead_end, refused)


def _draw_exact(
    scores: torch.Tensor, rows: Rows, index: Int64, following: Int64, state: SamplerState
) -> tuple[Int64, Bools]:
    """(own tokens [R], whether they are the drafted ones [R]), set in the rows ``index`` only."""
    own, passed = np.zeros_like(following), np.zeros(following.size, np.bool_)
    if index.size:
        drawn, _ = draw(ops.take(scores, index), rows.take(index), state, Purpose.TARGET)
        own[index] = ops.to_host(drawn)
        passed[index] = own[index] == following[index]
    return own, passed


def padded(drafts: Drafts) -> Int64:
    """[B, K + 1] the drafted tokens and a column more: a new array."""
    batch, width = drafts.tokens.shape
    tokens = np.zeros((batch, width + 1), np.int64)
    tokens[:, :width] = drafts.tokens
    return tokens
