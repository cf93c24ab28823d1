"""Known texts, of what a drafter got right in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynaspec.bench.oracle_steps import Floats, KnownText, Rollouts, run_lengths


def known(
    equal: Sequence[bool],
    confidence: Floats | None = None,
    max_tokens: int | None = None,
    signal: Floats | None = None,
) -> KnownText:
    """Without other signals the drafter is sure of everything, and has no signal for anything."""
    n = len(equal)
    if confidence is None:
        confidence = np.ones((n, 4))
    if signal is None:
        signal = np.zeros(confidence.shape)
    return KnownText(Rollouts(run_lengths(np.array(equal)), confidence, signal), max_tokens or n)
