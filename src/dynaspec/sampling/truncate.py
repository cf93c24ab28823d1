"""Temperature, min-p, top-k and top-p on CPU, in linear time.

Top-k and top-p both keep the beginning of one order: larger scores first, equal scores by lower id. Where it
ends is found by radix selection on the scores' bits, eleven or ten at a time, instead of by sorting.
"""

from __future__ import annotations

import math

import numpy as np

from dynaspec.compiled import kernel, subroutine

from .cpu import Float32, Float64, ordered, total, weigh
from .rng import Int64

_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(shift, width) in bits, from the top."""
_BINS = 2**11
_TOP_BIT = 2**31


@kernel
def truncate(scores: Float32, index: Int64, temperature: Float32, min_p: Float64, top_k: Int64, top_p: Float64) -> None:
    """Divides rows by their temperature, then sets to −inf what min-p, top-k and top-p exclude, in that order.

    Top-p's mass is that of what the others left, and a token stays while the mass before it is < top_p.

    Args:
        scores: [R, V], changed in place
        index: [r] rows to change
        temperature: [r], > 0
        min_p: [r], 0 = all
        top_k: [r], 0 = all
        top_p: [r], 1 = all
    """
    vocab = scores.shape[1]
    weights = np.empty(vocab, np.float64)
    scratch = (np.empty(vocab, np.int64), np.empty(vocab, np.float64))
    for r in range(index.size):
        row = scores[index[r]]
        for i in range(vocab):
            row[i] = row[i] / temperature[r]
        if min_p[r] > 0.0:
            _drop_unlikely(row, min_p[r])
        if 0 < top_k[r] < vocab:
            weights[:] = 0.0
            _keep_first(row, weights, 0.0, top_k[r], math.inf, scratch)
        if top_p[r] < 1.0:
            weigh(row, weights)
            mass = total(weights)
            # All tokens lighter than this weigh less than 1 − top_p together, so the end lies above them.
            floor = 0.5 * (1.0 - top_p[r]) * mass / vocab
            _keep_first(row, weights, floor, vocab, top_p[r] * mass, scratch)


@subroutine
def _drop_unlikely(row: Float32, min_p: float) -> None:
    limit = np.float64(row.max()) + math.log(min_p)
    for i in range(row.size):
        if np.float64(row[i]) < limit:
            row[i] = -np.inf


@subroutine
def _keep_first(
    row: Float32, weights: Float64, floor: float, most: int, mass: float, scratch: tuple[Int64, Float64]
) -> None:
    """Keeps the first ``most`` tokens, and of those each with less than ``mass`` before it.

    Tokens lighter than ``floor`` are known to lie behind.
    """
    orders, masses = scratch
    count = 0
    for i in range(row.size):
        orders[count], masses[count] = ordered(row[i]), weights[i]
        count += weights[i] >= floor
    last, ties = _last_kept(orders[:count], masses[:count], most, mass)
    for i in range(row.size):
        order = ordered(row[i])
        if order == last and ties > 0:
            ties -= 1
        elif order <= last:
            row[i] = -np.inf


@subroutine
def _last_kept(orders: Int64, masses: Float64, most: int, mass: float) -> tuple[int, int]:
    """(order of the last token kept, how many of exactly this order are kept); uses up its arguments."""
    counts = np.empty(_BINS, np.int64)
    sums = np.empty(_BINS, np.float64)
    size, prefix, digit = orders.size, 0, 0
    for shift, width in _DIGITS:
        counts[:] = 0
        sums[:] = 0.0
        mask = (1 << width) - 1
        for i in range(size):
            digit = ((orders[i] + _TOP_BIT) >> shift) & mask
            counts[digit] += 1
            sums[digit] += masses[i]
        digit, most, mass = _last_digit(counts, sums, most, mass)
        prefix = (prefix << width) | digit
        members = 0
        for i in range(size):
            orders[members], masses[members] = orders[i], masses[i]
            members += ((orders[i] + _TOP_BIT) >> shift) & mask == digit
        size = members
    ties = 0
    while ties < size and ties < most and ties * masses[0] < mass:
        ties += 1
    return prefix - _TOP_BIT, ties


@subroutine
def _last_digit(counts: Int64, sums: Float64, most: int, mass: float) -> tuple[int, int, float]:
    """(digit, from the top, in which ``most`` tokens or ``mass`` is reached; what of both is left for it)."""
    last, left, left_mass = 0, most, mass
    for digit in range(counts.size - 1, -1, -1):
        if counts[digit] > 0:
            last, left, left_mass = digit, most, mass
            most -= counts[digit]
            mass -= sums[digit]
            if most <= 0 or mass <= 0.0:
                break
    return last, left, left_mass
