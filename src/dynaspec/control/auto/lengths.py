"""How long to draft and how much to verify, by what a token is worth in seconds.

At the best possible goodput λ* every further token must bring at least λ* tokens a second of its own: with ν = 1/λ the
seconds that a token is worth, a draft slot pays if its chance to be accepted times ν exceeds the seconds it costs
(Dinkelbach's method for ratios; optimal stopping as in the classical monotone case: chances only fall along a draft).
Everything here rests on what is known before drafting, or on confidences that come before the token they decide about.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from .curve import interpolate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@njit(cache=True, nogil=True)
def chain_depths(
    bias: Floats,
    offset: Floats,
    cap: Ints,
    runnable: npt.NDArray[np.bool_],
    lag_s: Floats,
    value: float,
    call_s: float,
    pass_s: float,
    row_s: float,
    knots: Floats,
    seconds: Floats,
    base_rows: float,
    depth: Ints,
    worth: Floats,
) -> tuple[float, float, float, float]:
    """Draft lengths for a proposer that needs a pass for each token.

    Pass j runs for the requests whose slot j pays for its own rows; the passes are as many as bring most in sum.

    Args:
        bias, offset: of the acceptance model without a feature; offset [B].
        cap: [B] longest draft of each request.
        runnable: [longest + 1] draft lengths that the host can run.
        lag_s: [B] seconds to catch up with what the drafter lacks of each request, this step's share of them.
        value: seconds that a token is worth.
        call_s, pass_s, row_s: what drafting costs.
        knots, seconds: the target's cost curve.
        base_rows: rows of the target pass without drafts.
        depth: [B] out, the lengths.
        worth: [B] out, seconds that drafting for each request brings, its share of the passes paid.

    Returns:
        Expected accepted tokens, passes, seconds of catching up, target rows in all.
    """
    requests = cap.size
    longest = 0
    for r in range(requests):
        longest = max(longest, cap[r])
        depth[r] = 0
        worth[r] = 0.0
    reach = np.ones(requests)
    running = cap > 0
    share = np.zeros(requests)
    profit, best_profit, best_passes = -call_s, 0.0, 0
    rows, tokens, catching_up = base_rows, 0.0, 0.0
    result = (0.0, 0.0, 0.0, base_rows)
    for j in range(longest):
        slope = interpolate(knots, seconds, rows + 1.0) - interpolate(knots, seconds, rows)
        count, gain = 0, 0.0
        for r in range(requests):
            if not running[r] or cap[r] <= j:
                running[r] = False
                continue
            chance = reach[r] / (1.0 + np.exp(-(bias[min(j, bias.size - 1)] + offset[r])))
            own = chance * value - row_s - slope - (lag_s[r] if j == 0 else 0.0)
            if own <= 0.0:
                running[r] = False
                continue
            reach[r] = chance
            share[r] = own
            gain += own
            tokens += chance
            catching_up += lag_s[r] if j == 0 else 0.0
            count += 1
        if count == 0:
            break
        rows += count
        profit += gain - pass_s
        for r in range(requests):
            if running[r]:
                worth[r] += share[r] - pass_s / count
        if profit > best_profit and runnable[j + 1]:
            best_profit, best_passes = profit, j + 1
            result = (tokens, float(best_passes), catching_up, rows)
            for r in range(requests):
                if running[r]:
                    depth[r] = j + 1
    return result


@njit(cache=True, nogil=True)
def lookup_depths(
    weight: float,
    bias: Floats,
    offset: Floats,
    feature: Floats,
    cap: Ints,
    value: float,
    knots: Floats,
    seconds: Floats,
    base_rows: float,
    depth: Ints,
    worth: Floats,
) -> tuple[float, float]:
    """Draft lengths for a proposer that costs nothing but the target's rows; arguments as for ``chain_depths``.

    Args:
        feature: [B] of the acceptance model.

    Returns:
        Expected accepted tokens, target rows in all.
    """
    tokens, rows = 0.0, base_rows
    for r in range(cap.size):
        reach, depth[r], worth[r] = 1.0, 0, 0.0
        for j in range(cap[r]):
            slope = interpolate(knots, seconds, rows + 1.0) - interpolate(knots, seconds, rows)
            reach /= 1.0 + np.exp(-(weight * feature[r] + bias[min(j, bias.size - 1)] + offset[r]))
            if reach * value <= slope:
                break
            worth[r] += reach * value - slope
            depth[r] = j + 1
            tokens += reach
            rows += 1.0
    return tokens, rows


@njit(cache=True, nogil=True)
def expected_tokens(weight: float, bias: Floats, offset: Floats, feature: Floats, depth: Ints) -> float:
    """Accepted tokens expected of drafts of ``depth`` [B]; arguments as for ``lookup_depths``."""
    tokens = 0.0
    for r in range(depth.size):
        reach = 1.0
        for j in range(depth[r]):
            reach /= 1.0 + np.exp(-(weight * feature[r] + bias[min(j, bias.size - 1)] + offset[r]))
            tokens += reach
    return tokens


@njit(cache=True, nogil=True)
def survivals(weight: float, bias: Floats, offset: Floats, feature: Floats, lens: Ints) -> Floats:
    """Chance that each drafted token and all before it are accepted.

    Args:
        offset: [B].
        feature: [N] of the drafted tokens of all B requests, one request after the other.
        lens: [B].

    Returns:
        [N], not increasing along a request's draft.
    """
    out = np.empty(feature.size)
    n = 0
    for r in range(lens.size):
        reach = 1.0
        for j in range(lens[r]):
            reach /= 1.0 + np.exp(-(weight * feature[n] + bias[min(j, bias.size - 1)] + offset[r]))
            out[n] = reach
            n += 1
    return out


@njit(cache=True, nogil=True)
def admit_by_survival(
    survival: Floats, lens: Ints, value: float, knots: Floats, seconds: Floats, base_rows: float, budget: int
) -> Ints:
    """Slots to verify of each request: position by position, at each in order of survival as long as they pay.

    Causal: how far others draft may depend on a request's later confidences (``StopRule.total_below``), so no slot
    gives way to one that was drafted after it.

    Args:
        survival: [N] as ``survivals`` gives them.
        lens: [B].
        budget: most slots.
    """
    start = np.cumsum(lens) - lens
    depth = np.zeros(lens.size, np.int64)
    taken = 0
    here = interpolate(knots, seconds, base_rows)
    for position in range(lens.max() if lens.size else 0):
        rows = np.flatnonzero((lens > position) & (depth == position))
        for index in np.argsort(-survival[start[rows] + position], kind="mergesort"):
            r = rows[index]
            above = interpolate(knots, seconds, base_rows + taken + 1.0)
            if taken >= budget or survival[start[r] + position] * value < above - here:
                break
            depth[r] += 1
            taken += 1
            here = above
    return depth
