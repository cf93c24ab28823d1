"""Rejection sampling of drafted tokens (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

A token x ~ q is accepted with probability min(1, p(x) / q(x)). In place of a rejected one, a token is drawn from
normalise(max(p − q, 0)). What is emitted is then distributed as p, whatever q is. A deterministic draft is the
case q = one-hot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.sampling import ops
from dynaspec.sampling.rng import Purpose, uniforms
from dynaspec.sampling.rows import Rows
from dynaspec.sampling.state import SamplerState

Bools = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]


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
