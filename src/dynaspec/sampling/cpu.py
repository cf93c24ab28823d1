"""Row kernels on CPU: softmax, exponential race, cutting the tail, a grammar's masks.

Compiled by numba, one thread, no GIL.

exp and log are written out here. A library's vectorised and scalar versions differ in the last bit, and which of
them an element meets depends on where in memory its row lies; these give the same bits for a row alone as in any
batch. No reduction is reordered by the compiler (no ``fastmath``).

The tail is cut in linear time. Top-k and top-p both keep the beginning of one order: larger scores first, equal scores
by lower id. Where it ends is found by radix selection on the scores' bits, eleven or ten at a time, instead of by
sorting.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import inlined, kernel, subroutine

from .rng import Int64, UInt64, nth

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_LN2 = math.log(2.0)
_LOG2_E = 1.0 / _LN2
_SQRT2 = math.sqrt(2.0)
_ROUND = 1.5 * 2.0**52
"""Adding it to a double of moderate size leaves the rounded integer in the low bits."""
_ROUND_SINGLE = 1.5 * 2.0**23
"""The same for single precision."""
_MANTISSA = 2**52 - 1
_ONE_BITS = 1023 << 52
_INF_BITS = 0x7FF << 52
_WORD, _ALL = 32, np.int32(-1)
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(shift, width) in bits, from the top, of the digits that scores are selected by."""
_BINS = 2**11
_TOP_BIT = 2**31


@inlined
def _exp(x: float) -> float:
    """e^x for x ≤ 0, relative error below 1e-13; constant below −700."""
    x = max(x, -700.0)
    shifted = x * _LOG2_E + _ROUND
    power = np.float64(shifted).view(np.int64)
    r = x - (shifted - _ROUND) * _LN2
    series = 1.0 / 39916800.0
    series = series * r + 1.0 / 3628800.0
    series = series * r + 1.0 / 362880.0
    series = series * r + 1.0 / 40320.0
    series = series * r + 1.0 / 5040.0
    series = series * r + 1.0 / 720.0
    series = series * r + 1.0 / 120.0
    series = series * r + 1.0 / 24.0
    series = series * r + 1.0 / 6.0
    series = series * r + 0.5
    series = series * r + 1.0
    series = series * r + 1.0
    return series * np.int64((power + 1023) << 52).view(np.float64)


@inlined
def _exp_single(x: np.float32) -> np.float32:
    """e^x for x ≤ 0 in single precision, relative error below 1e-6; constant below −80."""
    x = max(x, np.float32(-80.0))
    shifted = x * np.float32(_LOG2_E) + np.float32(_ROUND_SINGLE)
    power = np.float32(shifted).view(np.int32)
    r = x - (shifted - np.float32(_ROUND_SINGLE)) * np.float32(_LN2)
    series = np.float32(1.0 / 720.0)
    series = series * r + np.float32(1.0 / 120.0)
    series = series * r + np.float32(1.0 / 24.0)
    series = series * r + np.float32(1.0 / 6.0)
    series = series * r + np.float32(0.5)
    series = series * r + np.float32(1.0)
    series = series * r + np.float32(1.0)
    scale = np.int32((power + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(series * scale)


@inlined
def exponential(bits: np.uint64) -> float:
    """−log(u) for u = (52 random bits + ½) / 2⁵²: exact steps down to 2⁻⁵³ near 0, never 0 and never infinite."""
    u = (np.float64(np.int64(bits >> np.uint64(12))) + 0.5) * 2.0**-52
    pattern = np.float64(u).view(np.int64)
    power = (pattern >> 52) - 1023
    mantissa = np.int64((pattern & _MANTISSA) | _ONE_BITS).view(np.float64)
    above = mantissa > _SQRT2
    mantissa = mantissa * 0.5 if above else mantissa
    power = power + 1 if above else power
    s = (mantissa - 1.0) / (mantissa + 1.0)  # log(mantissa) = 2 artanh(s), |s| < 0.172
    t = s * s
    series = 2.0 / 17.0
    series = series * t + 2.0 / 15.0
    series = series * t + 2.0 / 13.0
    series = series * t + 2.0 / 11.0
    series = series * t + 2.0 / 9.0
    series = series * t + 2.0 / 7.0
    series = series * t + 2.0 / 5.0
    series = series * t + 2.0 / 3.0
    series = series * t + 2.0
    return -(np.float64(power) * _LN2 + s * series)


@inlined
def _ordered(x: np.float32) -> np.int32:
    """An integer that orders as the float does; −0 and +0 are one."""
    bits = np.float32(x + np.float32(0.0)).view(np.int32)
    return bits if bits >= 0 else bits ^ np.int32(0x7FFFFFFF)


@inlined
def _maximum(row: Float32) -> float:
    """The largest value. Integer comparison, which the compiler may vectorise."""
    top = np.int32(-(2**31))
    for i in range(row.size):
        top = max(top, _ordered(row[i]))
    bits = top if top >= 0 else top ^ np.int32(0x7FFFFFFF)
    return np.float64(np.int32(bits).view(np.float32))


@inlined
def _total(values: Float64) -> float:
    """Sum in a fixed order of eights."""
    result = 0.0
    whole = values.size - values.size % 8
    for i in range(0, whole, 8):
        low = (values[i] + values[i + 1]) + (values[i + 2] + values[i + 3])
        high = (values[i + 4] + values[i + 5]) + (values[i + 6] + values[i + 7])
        result += low + high
    for i in range(whole, values.size):
        result += values[i]
    return result


@inlined
def _weigh(row: Float32, out: Float64) -> None:
    """out = exp(row − max(row)); 0 where the row is −inf, also if all of it is."""
    top = _maximum(row)
    for i in range(row.size):
        weight = _exp(np.float64(row[i]) - top)
        out[i] = weight if row[i] > -np.inf else 0.0


@kernel
def softmax(scores: Float32, index: Int64, out: Float32) -> None:
    """out[r] = softmax(scores[index[r]]); zeros for a row that is −inf throughout.

    Args:
        scores: [R, V]
        index: [r] rows of ``scores``
        out: [r, V]
    """
    weights = np.empty(scores.shape[1], np.float64)
    for r in range(index.size):
        _weigh(scores[index[r]], weights)
        mass = _total(weights)
        scale = 1.0 / mass if mass > 0.0 else 0.0
        row = out[r]
        for i in range(row.size):
            row[i] = np.float32(weights[i] * scale)


@kernel
def probability(scores: Float32, tokens: Int64, out: Float32) -> None:
    """out[r] = softmax(scores[r])[tokens[r]]; NaN where that score is NaN or the row is −inf throughout.

    Args:
        scores: [R, V]
        tokens: [R]
        out: [R]
    """
    weights = np.empty(scores.shape[1], np.float64)
    for r in range(tokens.size):
        _weigh(scores[r], weights)
        mass = _total(weights)
        known = mass > 0.0 and not np.isnan(scores[r, tokens[r]])
        out[r] = np.float32(weights[tokens[r]] / mass) if known else np.nan


@kernel
def leaders(scores: Float32, tokens: Int64, probability: Float32, lead: Float32) -> None:
    """The largest of each row of scores [r, V]: which (the lowest id among equals), its softmax probability, and by
    how much it exceeds the second largest. The probability is NaN where a score is NaN, or all are −inf.

    In 16 lanes, which the compiler turns into vectors.
    """
    first, second = np.empty(16, np.float32), np.empty(16, np.float32)
    masses = np.empty(16, np.float32)
    for r in range(tokens.size):
        row = scores[r]
        first[:] = -np.inf
        second[:] = -np.inf
        whole = row.size // 16 * 16
        for i in range(0, whole, 16):
            for lane in range(16):
                x = row[i + lane]
                second[lane] = max(second[lane], min(first[lane], x))
                first[lane] = max(first[lane], x)
        for i in range(whole, row.size):
            second[0] = max(second[0], min(first[0], row[i]))
            first[0] = max(first[0], row[i])
        best, next_best = first[0], second[0]
        for lane in range(1, 16):
            next_best = max(next_best, second[lane], min(best, first[lane]))
            best = max(best, first[lane])
        token = 0
        while token < row.size - 1 and row[token] != best:
            token += 1
        masses[:] = np.float32(0.0)
        for i in range(0, whole, 16):
            for lane in range(16):
                masses[lane] += _exp_single(row[i + lane] - best)
        for i in range(whole, row.size):
            masses[0] += _exp_single(row[i] - best)
        mass = 0.0
        for lane in range(16):
            mass += np.float64(masses[lane])
        tokens[r] = token
        probability[r] = np.float32(1.0 / mass) if row[token] == best and mass >= 1.0 else np.nan
        lead[r] = best - next_best


@kernel
def excess(p: Float32, rows: Int64, scale: Float64, q: Float32, request: Int64, slot: Int64, out: Float64) -> None:
    """out[r] = Σ max(scale[r] · p[rows[r]] − q[request[r], slot[r]], 0), in 8 lanes.

    Args:
        p: [R, V]
        q: [B, K, V]
    """
    lanes = np.empty(8, np.float64)
    for r in range(rows.size):
        row, other, times = p[rows[r]], q[request[r], slot[r]], np.float32(scale[r])
        lanes[:] = 0.0
        whole = row.size // 8 * 8
        for i in range(0, whole, 8):
            for lane in range(8):
                lanes[lane] += np.float64(max(times * row[i + lane] - other[i + lane], np.float32(0.0)))
        for i in range(whole, row.size):
            lanes[0] += np.float64(max(times * row[i] - other[i], np.float32(0.0)))
        out[r] = _total(lanes)


@kernel
def top(scores: Float32, tokens: Int64, probability: Float32) -> None:
    """The largest of each row of scores [r, V], in order, the lowest id first among equals: which, and their softmax
    probabilities, NaN where a score is NaN or all are −inf.

    Args:
        tokens, probability: [r, n] out; n ≤ V.
    """
    count, span = tokens.shape[1], 256
    best, lanes, masses = np.empty(count, np.float32), np.empty(16, np.float32), np.empty(16, np.float32)
    for r in range(tokens.shape[0]):
        row, found = scores[r], tokens[r]
        best[:] = -np.inf
        for n in range(count):
            found[n] = n
        for start in range(0, row.size, span):
            end = min(start + span, row.size)
            whole = start + (end - start) // 16 * 16
            lanes[:] = -np.inf
            for i in range(start, whole, 16):
                for lane in range(16):
                    lanes[lane] = max(lanes[lane], row[i + lane])
            most = lanes[0]
            for lane in range(1, 16):
                most = max(most, lanes[lane])
            for i in range(whole, end):
                most = max(most, row[i])
            if not most > best[count - 1]:
                continue
            for i in range(start, end):
                if row[i] > best[count - 1]:
                    at = count - 1
                    while at > 0 and row[i] > best[at - 1]:
                        best[at], found[at] = best[at - 1], found[at - 1]
                        at -= 1
                    best[at], found[at] = row[i], i
        masses[:] = np.float32(0.0)
        whole = row.size // 16 * 16
        for i in range(0, whole, 16):
            for lane in range(16):
                masses[lane] += _exp_single(row[i + lane] - best[0])
        for i in range(whole, row.size):
            masses[0] += _exp_single(row[i] - best[0])
        mass = 0.0
        for lane in range(16):
            mass += np.float64(masses[lane])
        for n in range(count):
            # Behind as many −inf as there are, what was found is what was there first.
            weight = np.float64(_exp_single(best[n] - best[0])) if best[n] > -np.inf else 0.0
            probability[r, n] = np.float32(weight / mass) if mass >= 1.0 else np.nan


@kernel
def race(weights: Float32, keys: UInt64, out: Int64) -> None:
    """out[r] = argmin_i E_i / weights[r, i] with exponential noise E of stream keys[r]; 0 if no weight is positive.

    Token i wins with probability weights[r, i] / Σ weights[r].

    Args:
        weights: [r, V], none negative
        keys: [r]
        out: [r]
    """
    times = np.empty(weights.shape[1], np.float64)
    bits = times.view(np.int64)
    support, rates = np.empty(weights.shape[1], np.int64), np.empty(weights.shape[1], np.float64)
    for r in range(keys.size):
        row, key = weights[r], keys[r]
        size = 0
        for i in range(row.size):
            support[size], rates[size] = i, row[i]
            size += row[i] > 0.0
        for n in range(size):
            times[n] = exponential(nth(key, support[n])) / rates[n]
        first = np.int64(_INF_BITS)  # bits of non-negative doubles order as the doubles do
        for n in range(size):
            first = min(first, bits[n])
        winner = 0
        while winner < size - 1 and bits[winner] != first:
            winner += 1
        out[r] = support[winner] if size else 0


@kernel
def keep_set(scores: Float32, index: Int64, bits: npt.NDArray[np.int32]) -> None:
    """Sets scores[index[r], i] to −inf where bit i % 32 of bits[r, i // 32] is 0, and behind the last bit.

    Args:
        scores: [R, V], changed in place
        index: [r] rows of ``scores``
        bits: [r, W]
    """
    vocab = scores.shape[1]
    for r in range(index.size):
        row = scores[index[r]]
        for w in range(bits.shape[1]):
            word = bits[r, w]
            if word != _ALL:
                for i in range(_WORD * w, min(_WORD * (w + 1), vocab)):
                    if not (word >> (i - _WORD * w)) & 1:
                        row[i] = -np.inf
        for i in range(_WORD * bits.shape[1], vocab):
            row[i] = -np.inf


@kernel
def empty(scores: Float32, index: Int64, out: npt.NDArray[np.bool_]) -> None:
    """out[r] = whether no score of the row ``index[r]`` is above −inf.

    Args:
        scores: [R, V]
        index: [r] rows of ``scores``
        out: [r]
    """
    for r in range(index.size):
        row = scores[index[r]]
        i = 0
        while i < row.size and not row[i] > -np.inf:
            i += 1
        out[r] = i == row.size


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
            _weigh(row, weights)
            mass = _total(weights)
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
        orders[count], masses[count] = _ordered(row[i]), weights[i]
        count += weights[i] >= floor
    last, ties = _last_kept(orders[:count], masses[:count], most, mass)
    for i in range(row.size):
        order = _ordered(row[i])
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
