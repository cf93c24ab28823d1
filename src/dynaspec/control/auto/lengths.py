"""How long to draft and how much to verify, by what a token is worth in seconds.

At the best possible goodput λ every further token must bring λ tokens a second of its own: with ν = 1/λ, the token
price, a slot pays if its survival times ν exceeds the seconds it costs (Dinkelbach's method for ratios). Survivals fall
along a draft, so a sort by what slots bring for a row keeps every draft whole. Everything here rests on what is known
before drafting, or, in the trim, on signals that come before the token they decide about.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ..estimate.costs import row_price_s, target_s

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Slots(NamedTuple):
    """What a proposer could draft in a step, and at what price. B requests."""

    survival: Floats
    """[B, longest] chance that a slot and all before it are accepted."""
    cap: Ints
    """[B] longest draft of each request."""
    row_s: Floats
    """[B] seconds of a drafted token: in the drafter, and of what its row sees of the context in the target."""
    read_s: Floats
    """[B] seconds of what the drafter has to read of a request first, as far as this step pays for it."""
    start_s: float
    """Of a draft, whoever it is for."""
    pass_s: float
    one_pass: bool
    """One pass for the whole draft, else one for each token."""


class Target(NamedTuple):
    """The target's pass in a step: the curve of ``StepCosts``, and its rows without drafts."""

    knots: Floats
    curve: Floats
    rows: float


@njit(cache=True, nogil=True)
def reading(
    lag: Ints, room: Ints, cap: Ints, read_in_s: float, pay_off: float, context: int
) -> tuple[Ints, Floats, Floats]:
    """What it takes to draft for requests of which the drafter lacks ``lag`` [B] tokens.

    Args:
        room: [B] tokens that each request still has, of which a step with drafts emits two, about.
        cap: [B] longest drafts.
        read_in_s: seconds of a token that is read in.
        pay_off: most steps over which it is paid off.
        context: > 0: reads so many tokens only, to draft one from them.

    Returns:
        [B] longest drafts; seconds to read what is lacking; as far as one step pays for it.
    """
    most, seconds, share = cap.copy(), np.empty(cap.size), np.empty(cap.size)
    for r in range(cap.size):
        if 0 < context < lag[r]:
            most[r] = min(cap[r], 1)
        seconds[r] = read_in_s * (min(lag[r], context) if context else lag[r])
        share[r] = seconds[r] / min(max(room[r] / 2.0, 1.0), pay_off)
    return most, seconds, share


@njit(cache=True, nogil=True)
def fill(price: float, slots: Slots, levels: Ints, uniform: bool, target: Target) -> Ints:
    """[B] The draft lengths that bring most with one proposer at a token price; at least one token, if there is room.

    For each number of passes the slots are taken in order of what they bring for a row, as many as bring most on this
    cost curve, whatever its shape.

    Args:
        price: seconds that a token is worth, ν.
        levels: lengths that can run, ascending, above 0.
        uniform: all lengths must be alike.
    """
    knots, curve, base = target
    cap, requests, depth = slots.cap, slots.cap.size, np.zeros(slots.cap.size, np.int64)
    # [B, L] What the slots from one length that can run to the next bring, and which of them there can be.
    value, width = np.zeros((requests, levels.size)), levels.astype(np.float64)
    width[1:] -= levels[:-1]
    able = cap.reshape(-1, 1) >= levels.reshape(1, -1)
    for i in range(levels.size):
        for j in range(levels[i] - int(width[i]), min(levels[i], slots.survival.shape[1])):
            value[:, i] += slots.survival[:, j] * price - slots.row_s
    # A request that brings less than reading it takes is left out; one drafts in any case.
    row = row_price_s(knots, curve, base, float(requests))
    brings = np.where(able, np.maximum(value - row * width, 0.0), 0.0).sum(axis=1) - slots.read_s
    first = np.argmax(np.where(able[:, 0], brings, -np.inf))
    if not able[first, 0]:
        return depth
    for r in range(requests):
        if brings[r] < 0.0 and r != first and not uniform:
            able[r, :] = False
    if uniform:  # an item is a length of all
        value[0, :], width = value.sum(axis=0), width * requests
        for i in range(levels.size):
            able[0, i] = able[:, i].all()
        value, able = value[:1, :], able[:1, :]
    items = np.argwhere(able)
    worth = np.array([value[r, i] / width[i] for r, i in items])
    items = items[np.argsort(-worth, kind="mergesort")]
    best, passes, count = -np.inf, 0, 0
    for d in range(1, levels.size + 1):
        overhead = slots.start_s + slots.pass_s * (1 if slots.one_pass else levels[d - 1])
        gain, filled, n = target_s(knots, curve, base) - overhead, base, 0
        for r, i in items:
            if i >= d:
                continue
            gain, filled, n = gain + value[r, i], filled + width[i], n + 1
            if n > 1 and value[r, i] <= 0.0:
                break
            if gain - target_s(knots, curve, filled) > best:
                best, passes, count = gain - target_s(knots, curve, filled), d, n
        following = np.where(able[:, d], np.maximum(value[:, d], 0.0), 0.0).sum() if d < levels.size else 0.0
        if following <= (
            0.0 if slots.one_pass else slots.pass_s * (levels[d] - levels[d - 1] if d < levels.size else 0)
        ):
            break
    for r, i in items:
        if i < passes and count > 0:
            count -= 1
            if uniform:
                depth[:] = np.maximum(depth, levels[i])
            else:
                depth[r] = max(depth[r], levels[i])
    return depth


@njit(cache=True, nogil=True)
def weigh(
    price: float, slots: Slots, depth: Ints, runs: npt.NDArray[np.bool_], target: Target
) -> tuple[float, float, Floats]:
    """What drafts of these lengths bring and take beyond plain decoding.

    Args:
        depth: [B]
        runs: [B] requests whose drafts take the passes that ``slots`` prices; the others' are looked up.

    Returns:
        Tokens expected to be accepted; seconds; [B] seconds that each request's slots bring, less those of their rows.
    """
    seconds = target_s(target.knots, target.curve, target.rows + depth.sum())
    seconds -= target_s(target.knots, target.curve, target.rows)
    each, passes, tokens, worth = seconds / max(1, depth.sum()), (depth * runs).max(), 0.0, np.zeros(depth.size)
    if passes:
        seconds += slots.start_s + slots.pass_s * (1 if slots.one_pass else passes)
    for r in range(depth.size):
        accepted = slots.survival[r, : depth[r]].sum()
        own_s = slots.row_s[r] * depth[r] + slots.read_s[r] * (depth[r] > 0)
        worth[r] = accepted * price - own_s - each * depth[r]
        tokens, seconds = tokens + accepted, seconds + own_s
    return tokens, seconds, worth


@njit(cache=True, nogil=True)
def stop_thresholds(
    price: float, biases: Floats, row_s: float, pass_s: float, target: Target, depth: Ints, longest: int
) -> tuple[Floats, Floats]:
    """Survivals of a draft below which its next token does not pay for its row, and all of them not for the pass.

    Args:
        biases: of the acceptance model: how likely the next token is accepted if the draft is.
        row_s: as in ``Slots``, on average.
        depth: [B] lengths planned, which say how many rows go on after each pass.
        longest: draft tokens.

    Returns:
        ``StopRule.below`` and ``total_below``, for each pass but the last one possible.
    """
    own, together, rows = np.empty(max(1, longest - 1)), np.empty(max(1, longest - 1)), target.rows
    for j in range(own.size):
        rows += max(1, (depth > j).sum())
        row = row_s + row_price_s(target.knots, target.curve, rows, float(max(1, (depth > j + 1).sum())))
        worth = price / (1.0 + np.exp(-biases[min(j + 1, biases.size - 1)]))
        own[j], together[j] = row / worth, pass_s / worth
    return own, together


@njit(cache=True, nogil=True)
def admit(price: float, survival: Floats, lens: Ints, row_s: Floats, target: Target, budget: int) -> Ints:
    """[B] Slots to verify: position by position, at each in order of survival as long as they pay.

    Causal: how far others draft may depend on a request's later signals (``StopRule.total_below``), so no slot gives
    way to one that was drafted after it.

    Args:
        survival: [N] of the drafted tokens, one request after the other, as known before each was drawn.
        lens: [B]
        row_s: [B] of what a row sees of the context.
        budget: most slots.
    """
    start, depth, taken = np.cumsum(lens) - lens, np.zeros(lens.size, np.int64), 0
    for position in range(lens.max() if lens.size else 0):
        going = np.flatnonzero((lens > position) & (depth == position))
        gain = np.empty(going.size)
        for i in range(going.size):
            gain[i] = survival[start[going[i]] + position] * price - row_s[going[i]]
        for i in np.argsort(-gain, kind="mergesort"):
            row = row_price_s(target.knots, target.curve, target.rows + taken, 2.0 * going.size)
            if taken >= budget or gain[i] < row:
                break
            depth[going[i]] += 1
            taken += 1
    return depth
