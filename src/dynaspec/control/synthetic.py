"""Acceptance that is drawn instead of tested, for performance work: ``rejection_sample_method: "synthetic"``.

Keys and meaning are vLLM's (``SpeculativeConfig``; vllm-project/vllm pull requests 38045 and 40662).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dynaspec.contract.errors import ConfigError

RATES_KEY = "synthetic_acceptance_rates"
LENGTH_KEY = "synthetic_acceptance_length"


def synthetic_rates(rates: Sequence[float] | None, length: float | None, k: int) -> tuple[float, ...]:
    """Unconditional acceptance per position, [k], non-increasing.

    Args:
        rates: the same, as configured; entry j − 1 is the chance that the first j tokens are all accepted.
        length: else the mean acceptance length to reach, 1 … k + 1; spread with the least variance: as many positions
            as fit are always accepted, one is accepted with the rest as its chance, none after it.
        k: ``num_speculative_tokens``.

    Raises:
        ConfigError: both or neither given, or values that cannot be.
    """
    if (rates is None) == (length is None):
        raise ConfigError(
            f"rejection_sample_method is 'synthetic' with {'neither' if rates is None else 'both'} of {RATES_KEY} and "
            f"{LENGTH_KEY}; expected one of the two"
        )
    if length is not None:
        if not 1.0 <= length <= k + 1:
            raise ConfigError(
                f"{LENGTH_KEY} is {length} with num_speculative_tokens {k}; expected a number from 1 to {k + 1}"
            )
        return tuple(min(1.0, max(0.0, length - 1 - position)) for position in range(k))
    given = tuple(rates or ())
    if len(given) != k:
        raise ConfigError(f"{RATES_KEY} has {len(given)} entries but num_speculative_tokens is {k}; expected as many")
    if any(after > before for before, after in pairwise(given)):
        raise ConfigError(f"{RATES_KEY} is {list(given)}; expected rates that do not increase")
    return given
