"""Temperature, min-p, top-k and top-p on CPU, in linear time.

Top-k and top-p both keep the beginning of one order: larger scores first, equal scores by lower id. Where that
beginning ends is found by radix selection on the scores' bits, in three passes of eleven bits or fewer, instead
of by sorting.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from .cpu import Float32, Float64, _ordered, _weights
from .rng import Int64

_SHIFTS = (21, 10, 0)
_WIDTHS = (11, 11, 10)
_BINS = 2**11
_TOP_BIT = 0x80000000


@numba.njit(nogil=True, cache=True, error_model="numpy")
def truncate(
    scores: Float32, index: Int64, temperature: Float32, min_p: Float64, top_k: Int64, top_p: Float64
) -> None:
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
    order = np.empty(vocab, np.int64)
    for r in range(index.size):
        row = scores[index[r]]
        for i in range(vocab):
            row[i] = row[i] / temperature[r]
        cut_k = 0 < top_k[r] < vocab
        if min_p[r] > 0.0:
            _drop_unlikely(row, min_p[r])
        if cut_k:
            _keep_first(row, weights, order, top_k[r], math.inf)
        if top_p[r] < 1.0:
            _weights(row, weights)
            _keep_first(row, weights, order, vocab, top_p[r] * weights.sum())


@numba.njit(error_model="numpy")
def _drop_unlikely(row: Float32, min_p: float) -> None:
    top = np.float64(row.max())
    limit = top + math.log(min_p)
    for i in range(row.size):
        if np.float64(row[i]) < limit:
            row[i] = -np.inf


@numba.njit(error_model="numpy")
def _keep_first(row: Float32, weights: Float64, order: Int64, most: int, mass: float) -> None:
    """Keeps the first ``most`` tokens of the order, and of those each with less than ``mass`` before it."""
    for i in range(row.size):
        order[i] = np.int64(_ordered(row[i])) + _TOP_BIT
    last, ties = _last_kept(order, weights, most, mass)
    for i in range(row.size):
        if order[i] < last:
            row[i] = -np.inf
        elif order[i] == last:
            if ties == 0:
                row[i] = -np.inf
            else:
                ties -= 1


@numba.njit(error_model="numpy")
def _last_kept(order: Int64, weights: Float64, most: int, mass: float) -> tuple[int, int]:
    """The smallest order kept, and how many tokens of exactly that order are."""
    counts = np.empty(_BINS, np.int64)
    masses = np.empty(_BINS, np.float64)
    seen, seen_mass, prefix, bin_ = 0, 0.0, 0, 0
    for level in range(3):
        shift, width = _SHIFTS[level], _WIDTHS[level]
        counts[:] = 0
        masses[:] = 0.0
        for i in range(order.size):
            if order[i] >> (shift + width) == prefix:
                bin_ = (order[i] >> shift) & ((1 << width) - 1)
                counts[bin_] += 1
                masses[bin_] += weights[i]
        bin_ = _last_bin(counts, masses, most - seen, mass - seen_mass)
        for above in range(bin_ + 1, 1 << width):
            seen += counts[above]
            seen_mass += masses[above]
        prefix = (prefix << width) | bin_
    weight = masses[bin_] / counts[bin_]
    ties = 0
    while ties < counts[bin_] and seen + ties < most and seen_mass + ties * weight < mass:
        ties += 1
    return prefix, ties


@numba.njit(error_model="numpy")
def _last_bin(counts: Int64, masses: Float64, most: int, mass: float) -> int:
    """The bin, counted from the top, in which ``most`` tokens or ``mass`` is reached; else the last non-empty."""
    last, seen, seen_mass = 0, 0, 0.0
    for bin_ in range(counts.size - 1, -1, -1):
        if counts[bin_] == 0:
            continue
        last = bin_
        seen += counts[bin_]
        seen_mass += masses[bin_]
        if seen >= most or seen_mass >= mass:
            break
    return last
