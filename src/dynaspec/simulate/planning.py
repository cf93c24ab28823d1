"""Goodput profiles for hardware nobody has at hand, from a cost model and a trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from dynaspec.contract.step import ProposerTraits
from dynaspec.control.profile import Profile

from .costs import CostModel
from .load import step_load
from .traces import Trace


def profile_of(
    costs: CostModel, trace: Trace, traits: ProposerTraits, *, batches: Iterable[int], longest: int
) -> Profile:
    """What ``dynaspec profile`` would measure: step times by batch size and draft length, and the trace's acceptance.

    Every request is taken to have the context that the trace has on average half-way through a request, and nothing
    is prefilled beside.

    Args:
        longest: the profile speaks for k = 0 … ``longest``.
    """
    context = int((trace.prompt + trace.output / 2).mean())
    stats = {
        batch: {k: _step_ms(costs, traits, batch, context, k) for k in range(longest + 1)}
        for batch in sorted(set(batches))
    }
    return Profile(
        batch_stats=stats,
        acceptance_rate_per_pos=tuple(round(rate, 4) for rate in trace.survival(longest).tolist()),
        max_num_speculative_tokens=longest,
    )


def with_acceptance(profile: Profile, conditional: float) -> Profile:
    """The profile at a constant conditional acceptance a: a, a², a³, …"""
    longest = profile.max_num_speculative_tokens
    rates = tuple(conditional**j for j in range(1, longest + 1))
    return replace(profile, acceptance_rate_per_pos=rates)


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, … and ``most``."""
    return sorted({1 << i for i in range(most.bit_length())} | {most})


def _step_ms(costs: CostModel, traits: ProposerTraits, batch: int, context: int, k: int) -> float:
    contexts, lens = np.full(batch, context), np.full(batch, k)
    # After a step the drafter lacks the last token at least; that is what its first pass takes in.
    ingested = np.full(batch, min(k, 1))
    return round(1e3 * costs.time(step_load(traits, contexts, lens, lens, ingested)).step_s, 4)
