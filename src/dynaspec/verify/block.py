"""Block verification: drawn chains are tested as a whole (Sun et al., "Block Verification Accelerates Speculative
Decoding", 2403.10444, algorithm 2).

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

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.sampling import ops
from dynaspec.sampling.rng import Purpose, uniforms
from dynaspec.sampling.rows import Rows
from dynaspec.sampling.state import SamplerState

from .rejection import Bools, Int64, RejectionSampling

Floats = npt.NDArray[np.float64]

_TINY = float(np.finfo(np.float64).tiny)


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
