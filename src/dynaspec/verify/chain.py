"""Verifying drafted chains so that the output keeps the target's own distribution.

Greedy and seeded requests: the target's token is drawn as in plain decoding, and drafted tokens are accepted for
as long as they are what the target draws. Others: rejection sampling, of single tokens or of blocks.

*Rejection sampling of tokens* (Leviathan et al., 2211.17192; Chen et al., 2302.01318): a token x ~ q is accepted with
probability min(1, p(x) / q(x)). In place of a rejected one, a token is drawn from normalise(max(p − q, 0)). What is
emitted is then distributed as p, whatever q is. A deterministic draft is the case q = one-hot.

*Block verification* tests drawn chains as a whole (Sun et al., "Block Verification Accelerates Speculative Decoding",
2403.10444, algorithm 2).

With p_0 = 1 and p_i = min(1, p_{i−1} · P(x_i)/Q(x_i)), the prefix x_1 … x_i passes with probability
h_i = S_i / (S_i + 1 − p_i), where S_i = Σ_x max(p_i · P(x) − Q(x), 0) over what may follow it; the whole chain with
p_L. The longest prefix that passes is accepted, whether shorter ones do or not. Behind it, a token is drawn from
normalise(max(p_i · P − Q, 0)), and behind the whole chain from P. Testing token by token is the same without the
memory in p_i: there a token that P likes better than Q makes up for nothing.

It is exact: a prefix is accepted, or begins something longer that is, with probability p_i given the drafts up to it.
For the whole chain that is its rule. For others, what is accepted behind has the chance
Σ_x Q(x) · p_{i+1} = Σ_x min(p_i · P(x), Q(x)) = p_i − S_i, and p_i − S_i + (1 − p_i + S_i) · h_i = p_i. So a drafted
token follows an accepted prefix with probability Q · min(p_i · P/Q, 1), a drawn one with p_i · P less that: together
p_i · P(x) for every x, which is P given that the prefix is accepted.

Nothing in this asks where chains end, as long as x_1 … x_i alone decide whether x_i is a chain's last: a draft may end
early and be trimmed by the rule that holds for testing token by token (``docs/exactness.md``), a grammar may end it at
a token that it refuses, and a dead end does. It would be wrong for a chain whose end depends on later tokens. Nor does
p_i depend on how long the chain is, so verifying more never makes an early token less likely to be accepted.
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
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose, uniforms
from dynaspec.sampling.state import SamplerState

Bools = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_TINY = float(np.finfo(np.float64).tiny)


def residual(p: torch.Tensor, q: torch.Tensor | None, tokens: Int64) -> torch.Tensor:
    """What replaces rejected ``tokens`` [r]: max(p − q, 0) [r, V], unnormalised; p where that is 0 throughout."""
    rest = ops.without(p, tokens) if q is None else (p - q).clamp_min_(0.0)
    return torch.where(rest.amax(-1, keepdim=True) > 0.0, rest, p)


class RejectionSampling:
    """Tests and draws for the rows of one target pass whose requests are neither greedy nor seeded.

    Args:
        scores: [R, V] processed scores of all rows
        rows: what the rows are
        index: the rows concerned
        q: [B, K, V] what the drafts were drawn from, or None where they are deterministic
        state: the requests' parameters
    """

    def __init__(
        self, scores: torch.Tensor, rows: Rows, index: Int64, q: torch.Tensor | None, state: SamplerState
    ) -> None:
        self._rows, self._q, self._state = rows, q, state
        self._p = ops.softmax(scores, index)
        self._place = np.zeros(rows.depth.size, np.int64)
        self._place[index] = np.arange(index.size)

    def accept(self, index: Int64, tokens: Int64) -> Bools:
        """Whether the drafted ``tokens`` [r], which the rows ``index`` [r] test, are accepted; never with p = 0."""
        p = ops.pick(self._p, self._place[index], tokens)
        q = 1.0 if self._q is None else ops.pick(self._q, *self._slots(index), tokens)
        return uniforms(self._state.keys(self._rows, index, Purpose.ACCEPT)) * q < p

    def replace(self, index: Int64, tokens: Int64) -> Int64:
        """Tokens [r] in place of the ``tokens`` that the rows ``index`` [r] rejected."""
        q = None if self._q is None else self._q[self._slots(index)]
        weights = residual(self._target(index), q, tokens)
        return ops.to_host(ops.race(weights, self._state.keys(self._rows, index, Purpose.RESIDUAL)))

    def draw(self, index: Int64) -> Int64:
        """Tokens [r] from p itself in the rows ``index`` [r], which have no drafted token to test."""
        weights = ops.take(self._p, self._place[index])
        return ops.to_host(ops.race(weights, self._state.keys(self._rows, index, Purpose.TARGET)))

    def _target(self, index: Int64) -> torch.Tensor:
        """What q falls short of in the rows ``index`` [r]: p [r, V]."""
        return ops.take(self._p, self._place[index])

    def _slots(self, index: Int64) -> tuple[Int64, Int64]:
        """Where q holds what the rows test."""
        return self._rows.request[index], self._rows.depth[index]


def passes(numbers: Floats, joint: Floats, excess: Floats, tested: Bools) -> Bools:
    """Whether prefixes pass: ``numbers`` uniform in (0, 1), ``joint`` p_i, ``excess`` S_i, all of one shape.

    Args:
        tested: something is drafted behind the prefix.
    """
    return np.where(tested, numbers * (excess + 1.0 - joint) < excess, numbers < joint)


class BlockVerification(RejectionSampling):
    """In place of testing token by token. Deterministic drafts are tested token by token: the two are the same there.

    Args:
        scores, rows, index, q, state: see ``RejectionSampling``
    """

    def __init__(
        self, scores: torch.Tensor, rows: Rows, index: Int64, q: torch.Tensor | None, state: SamplerState
    ) -> None:
        super().__init__(scores, rows, index, q, state)
        batch, width = rows.drafts.shape
        self._joint: Floats = np.ones((batch, width + 1))
        """[B, K + 1] p_i of each prefix; 0 behind a chain's end."""

    def accept(self, index: Int64, tokens: Int64) -> Bools:
        """Whether the drafted ``tokens`` [r] are part of the accepted prefix; the rows ``index`` [r] are all that test
        one. Never with p = 0."""
        if self._q is None:
            return super().accept(index, tokens)
        passed = self._passing(index, tokens, self._q)
        accepted = np.logical_or.accumulate(passed[:, ::-1], axis=1)[:, ::-1]
        request, depth = self._slots(index)
        return np.asarray(accepted[request, depth + 1])

    def _passing(self, index: Int64, tokens: Int64, q: torch.Tensor) -> Bools:
        """[B, K + 1] whether the prefix of each length passes, length 0 and those behind a chain's end never."""
        request, depth = at = self._slots(index)
        ratio, numbers = np.zeros_like(self._joint), np.ones_like(self._joint)
        tested = np.zeros(self._joint.shape, np.bool_)
        tested[at] = True
        ratio[at] = ops.pick(self._p, self._place[index], tokens) / np.maximum(ops.pick(q, *at, tokens), _TINY)
        numbers[request, depth + 1] = uniforms(self._state.keys(self._rows, index, Purpose.ACCEPT))
        for i in range(ratio.shape[1] - 1):
            self._joint[:, i + 1] = np.minimum(self._joint[:, i] * ratio[:, i], 1.0)

        excess = np.zeros_like(self._joint)
        inner = index[(depth > 0) & (self._joint[at] > 0.0)]
        slots = self._slots(inner)
        excess[slots] = ops.excess(self._p, self._place[inner], self._joint[slots], q, *slots)
        return passes(numbers, self._joint, excess, tested)

    def _target(self, index: Int64) -> torch.Tensor:
        """p_i · P in the rows ``index`` [r] of depth i: [r, V]."""
        p = super()._target(index)
        return p * torch.from_numpy(self._joint[self._slots(index)]).to(p)[:, None]


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
