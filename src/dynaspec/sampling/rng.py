"""Counter-based random numbers: every number is a pure function of what it is for.

A *key* is derived from (request seed, n-index, output position, purpose), and the i-th number of the stream that
it opens is the SplitMix64 output number i of a generator with that state (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014). Nothing is consumed, so nothing depends on batch, order, preemption
or on how many tokens were drafted.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import inlined, kernel

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of the SplitMix64 state: 2⁶⁴ / golden ratio, odd."""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)

_GOLDEN = np.uint64(GOLDEN)
_MULTIPLIER_1 = np.uint64(MULTIPLIERS[0])
_MULTIPLIER_2 = np.uint64(MULTIPLIERS[1])
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(shift) for shift in SHIFTS)
_MASK = 2**64 - 1


class Purpose(IntEnum):
    """What a random number is for. Numbers of different purposes are independent."""

    TARGET = 1
    """The target's own token. Coupled sampling shares this stream between drafter and target."""
    DRAFT = 2
    """A drafted token that rejection sampling will test."""
    ACCEPT = 3
    """Rejection sampling's decision about a drafted token."""
    RESIDUAL = 4
    """The token drawn in place of a rejected one."""
    SYNTHETIC = 5
    """Synthetic acceptance's decision about a drafted token."""


@inlined
def mix(state: np.uint64) -> np.uint64:
    """SplitMix64's output function, a bijection of 64-bit integers."""
    state = (state ^ (state >> _SHIFT_1)) * _MULTIPLIER_1
    state = (state ^ (state >> _SHIFT_2)) * _MULTIPLIER_2
    return state ^ (state >> _SHIFT_3)


@inlined
def nth(key: np.uint64, index: int) -> np.uint64:
    """The number ``index`` (from 0) of the stream that ``key`` opens."""
    return mix(key + _GOLDEN * np.uint64(index + 1))


def request_key(seed: int, n_index: int) -> int:
    """The 64-bit key of one continuation: the ``n_index``-th of a request with this seed (any integer)."""
    return _mix_int(_mix_int(seed) + GOLDEN * (n_index + 1))


def _mix_int(state: int) -> int:
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        state &= _MASK
        state = (state ^ (state >> shift)) * multiplier
    state &= _MASK
    return state ^ (state >> SHIFTS[-1])


@kernel
def row_keys(requests: UInt64, output_len: Int64, depth: Int64, purpose: Int64) -> UInt64:
    """Stream keys [R] of rows that decide output position ``output_len + depth``.

    TARGET depends on the position alone, which is what makes coupled output independent of drafting. The other
    purposes also depend on the committed length: a position drafted again in a later step gets fresh numbers,
    so that no decision between the steps (a draft length, say) can have seen them.
    """
    keys = np.empty(requests.size, np.uint64)
    for r in range(requests.size):
        key = nth(requests[r], output_len[r] + depth[r])
        key = nth(key, purpose[r])
        if purpose[r] != 1:  # Purpose.TARGET
            key = nth(key, depth[r])
        keys[r] = key
    return keys


@kernel
def uniforms(keys: UInt64) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each key; neither end is ever reached."""
    out = np.empty(keys.size, np.float64)
    for r in range(keys.size):
        out[r] = (np.float64(np.int64(nth(keys[r], 0) >> np.uint64(12))) + 0.5) * 2.0**-52
    return out
