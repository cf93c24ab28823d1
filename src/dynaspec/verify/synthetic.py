"""Synthetic acceptance: drafts are accepted at given rates, whatever was drafted. For performance work only.

The engine does all its real work (passes, sampling, KV, rollback) at any acceptance on any weights, so that load,
policies and hardware can be measured without a drafter that fits. The output is not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Drafts
from dynaspec.sampling import ops
from dynaspec.sampling.draw import draw
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose, uniforms
from dynaspec.sampling.state import SamplerState

from .chain import Accepted, emit, first_failures, padded

Int64 = npt.NDArray[np.int64]


class SyntheticAcceptance:
    """Accepts each slot with its conditional rate, by random numbers of a stream of their own.

    Args:
        rates: probability that all slots up to each position are accepted, from position 0: within 0 … 1, none
            above the one before. Positions behind the last are never accepted.

    Raises:
        ConfigError: no rates, a rate out of range, or one above the one before.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        if not rates:
            raise ConfigError("synthetic acceptance rates are empty; expected at least one")
        for position, rate in enumerate(rates):
            if not 0.0 <= rate <= 1.0:  # false for NaN
                raise ConfigError(
                    f"the synthetic acceptance rate of position {position} is {rate!r}; expected a number from 0 to 1"
                )
        for position, (before, rate) in enumerate(pairwise(rates), start=1):
            if rate > before:
                raise ConfigError(
                    f"the synthetic acceptance rate of position {position} is {rate!r} after {before!r}; expected "
                    "no rate above the one before, as a token counts only if all before it were accepted"
                )
        reached = (1.0, *rates)
        self._conditional = np.array(
            [rate / r if r > 0.0 else 0.0 for rate, r in zip((*rates, 0.0), reached, strict=True)]
        )
        """[positions + 1] chance of each slot, given that those before it were accepted; the last goes on."""

    def accept_chain(
        self, scores: torch.Tensor, rows: Rows, drafts: Drafts, lens: Int64, state: SamplerState
    ) -> Accepted:
        """What ``verify.chain.accept_chain`` does, except that acceptance never looks at the scores.

        Accepted drafts may be tokens that the request's rules forbid, but for a grammar's, which could not follow them.
        The token behind them is drawn from the scores of the row reached, also where that row's draft failed.
        """
        # All rows are drawn, as real verification of greedy and seeded requests does: a step should cost the same.
        drawn, _ = draw(scores, rows, state, Purpose.TARGET)
        everyone = np.arange(rows.depth.size)
        rate = self._conditional[np.minimum(rows.depth, self._conditional.size - 1)]
        passed = uniforms(state.keys(rows, everyone, Purpose.SYNTHETIC)) < rate
        drafted = rows.depth < lens[rows.request]
        nothing = state.without_token(scores, rows)
        refused = drafted & state.grammars.refused(rows, everyone, padded(drafts)[rows.request, rows.depth])
        stop = first_failures(drafted & passed & ~nothing & ~refused, rows, drafts)
        return emit(stop, rows, drafts, ops.to_host(drawn), nothing[stop], refused[stop])
