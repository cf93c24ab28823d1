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

from dynaspec.compiled import njit
from dynaspec.control.estimate.costs import row_price_s, target_s

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Slots(NamedTuple):
    """What could be drafted in a step, and at what price. B requests."""

    price: Floats
    """[B] seconds that a token of each request is worth, ν."""
    survival: Floats
    """[B, longest] chance that a slot and all before it are accepted; 0 beyond the cap."""
    cap: Ints
    """[B] longest drafts."""
    row_s: Floats
    """[B] seconds of a drafted token: in the drafter, and of what its row sees of the context in the target."""
    read_s: Floats
    """[B] seconds of what the drafter has to read of a request first, as far as this step pays for it."""
    runs: npt.NDArray[np.bool_]
    """[B] whether a draft takes passes; those of the others are looked up."""
    start_s: float
    """Of a draft that takes passes, whoever it is for."""
    pass_s: float
    one_pass: bool
    """One pass for the whole draft, else one for each token."""


class Target(NamedTuple):
    """The target's pass in a step: the curve of ``StepCosts``, and its rows without drafts."""

    knots: Floats
    curve: Floats
    rows: float


@njit(cache=True, nogil=True)
def fill(slots: Slots, levels: Ints, uniform: bool, target: Target) -> Ints:
    """[B] The draft lengths that bring most at these prices; at least one token, if there is room.

    For each number of passes the slots are taken in order of what they bring for a row, as many as bring most on this
    cost curve, whatever its shape.

    Args:
        levels: lengths that can run, ascending, above 0.
        uniform: all lengths must be alike.
    """
    knots, curve, base = target
    cap, requests, depth = slots.cap, slots.cap.size, np.zeros(slots.cap.size, np.int64)
    # [B, L] What the slots from one length that can run to the next bring, and which of them there can be.
    value, able = np.zeros((requests, levels.size)), cap.reshape(-1, 1) >= levels.reshape(1, -1)
    width, best, most = levels.astype(np.float64), -1, -np.inf
    for i in range(1, levels.size):
        width[i] -= levels[i - 1]
    row = row_price_s(knots, curve, base, float(requests))
    for r in range(requests):
        brings = -slots.read_s[r]
        for i in range(levels.size):
            if able[r, i]:
                for j in range(levels[i] - int(width[i]), levels[i]):
                    value[r, i] += slots.survival[r, j] * slots.price[r] - slots.row_s[r]
                brings += max(value[r, i] - row * width[i], 0.0)
        # A request that brings less than reading it takes is left out; one drafts in any case.
        if able[r, 0] and brings > most:
            if most < 0.0 and best >= 0 and not uniform:
                able[best, :] = False
            best, most = r, brings
        elif brings < 0.0 and not uniform:
            able[r, :] = False
    if best < 0:
        return depth
    runs = slots.runs
    if uniform:  # an item is a length of all
        for r in range(1, requests):
            for i in range(levels.size):
                value[0, i] += value[r, i]
                able[0, i] &= able[r, i]
        value, able, width, runs = value[:1, :], able[:1, :], width * requests, np.array([runs.any()])
    # What does not pay on the cheapest stretch of the curve pays nowhere, and need not be sorted.
    cheapest = np.inf
    for i in range(1, knots.size):
        if knots[i] > base and (knots[i - 1] < base + width.sum() * requests or i == knots.size - 1):
            cheapest = min(cheapest, (curve[i] - curve[i - 1]) / (knots[i] - knots[i - 1]))
    cheapest = cheapest if cheapest < np.inf else 0.0
    items, gain, n = np.empty((able.size, 2), np.int64), np.empty(able.size), 0
    for r in range(value.shape[0]):
        for i in range(levels.size):
            if able[r, i] and (i == 0 or value[r, i] > cheapest * width[i]):
                items[n, 0], items[n, 1], gain[n] = r, i, -value[r, i] / width[i]
                n += 1
    items = items[:n][np.argsort(gain[:n], kind="mergesort")]
    best_gain, passes, count, none_s = -np.inf, 0, 0, target_s(knots, curve, base)
    for d in range(levels.size + 1):
        overhead = slots.start_s + slots.pass_s * (1 if slots.one_pass else levels[d - 1]) if d else 0.0
        gain, filled, taken, more = none_s - overhead, base, 0, 0.0
        for r, i in items:
            if runs[r] and i >= d:
                more += max(value[r, i], 0.0) if i == d else 0.0
                continue
            gain, filled, taken = gain + value[r, i], filled + width[i], taken + 1
            if taken > 1 and value[r, i] <= 0.0:
                break
            net = gain - target_s(knots, curve, filled)
            if net > best_gain:
                best_gain, passes, count = net, d, taken
        if d and more <= (0.0 if slots.one_pass else slots.pass_s * (levels[min(d, levels.size - 1)] - levels[d - 1])):
            break
    for r, i in items:
        if count > 0 and (i < passes or not runs[r]):
            count -= 1
            if uniform:
                for request in range(requests):
                    depth[request] = max(depth[request], levels[i])
            else:
                depth[r] = max(depth[r], levels[i])
    return depth


@njit(cache=True, nogil=True)
def own_prices(survival: Floats, cap: Ints, row_s: Floats, target: Target, plain_s: float) -> Floats:
    """[B] Seconds that a token of a request takes at the length at which it takes least, if all that have found
    something drafted as much.

    A looked-up token is worth no more than that: had this step not brought it, the next one would have, as cheaply. So
    a draft ends where another row would hold up the other requests for longer than it saves.

    Args:
        survival, cap, row_s: as in ``Slots``.
        plain_s: of a step without drafts.
    """
    requests, alike = cap.size, max(1, (cap > 0).sum())
    each, found = plain_s / requests, np.full(requests, plain_s / requests)
    tokens, none_s = np.ones(requests), target_s(target.knots, target.curve, target.rows)
    for j in range(survival.shape[1]):
        rows_s = (target_s(target.knots, target.curve, target.rows + alike * (j + 1)) - none_s) / alike
        for r in range(requests):
            if cap[r] > j:
                tokens[r] += survival[r, j]
                found[r] = min(found[r], (each + rows_s + row_s[r] * (j + 1)) / tokens[r])
    return found


@njit(cache=True, nogil=True)
def weigh(price: float, slots: Slots, depth: Ints, target: Target) -> tuple[float, float, float, Floats]:
    """What drafts of these lengths [B] bring and take beyond plain decoding.

    Args:
        price: of every token here, so that what requests bring can be compared.

    Returns:
        Tokens expected to be accepted; seconds without reading; of reading, as far as this step pays for it; [B]
        seconds that each request's slots bring, less those of their rows and their share of the passes.
    """
    drafted, tokens, read_s, passes, sharing = 0, 0.0, 0.0, 0, 0
    for r in range(depth.size):
        drafted += depth[r]
        if slots.runs[r] and depth[r]:
            passes, sharing = max(passes, depth[r]), sharing + 1
    seconds, brings = target_s(target.knots, target.curve, target.rows + drafted), np.zeros(depth.size)
    seconds -= target_s(target.knots, target.curve, target.rows)
    each, share_s = seconds / max(1, drafted), 0.0
    if passes:
        passes_s = slots.start_s + slots.pass_s * (1 if slots.one_pass else passes)
        seconds, share_s = seconds + passes_s, passes_s / sharing
    for r in range(depth.size):
        if depth[r]:
            accepted = slots.survival[r, : depth[r]].sum()
            brings[r] = accepted * price - (slots.row_s[r] + each) * depth[r] - slots.read_s[r]
            brings[r] -= share_s * slots.runs[r]
            tokens, seconds, read_s = tokens + accepted, seconds + slots.row_s[r] * depth[r], read_s + slots.read_s[r]
    return tokens, seconds, read_s, brings


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
        expected = price / (1.0 + np.exp(-biases[min(j + 1, biases.size - 1)]))
        own[j], together[j] = row / expected, pass_s / expected
    return own, together


@njit(cache=True, nogil=True)
def branch_thresholds(price: float, row_s: float, target: Target, requests: int, most: int) -> Floats:
    """[most] Survival that pays for a tree's node at each place of the draft, where ``requests`` draft as much alike.

    Args:
        row_s: as in ``Slots``, on average.
    """
    below = np.empty(most)
    for n in range(most):
        rows, more = target.rows + requests * n, float(requests * (most - n))
        below[n] = (row_s + row_price_s(target.knots, target.curve, rows, more)) / price
    return below


@njit(cache=True, nogil=True)
def admit(price: float, survival: Floats, lens: Ints, row_s: Floats, target: Target, budget: int) -> Ints:
    """[B] Slots to verify: position by position, at each in order of survival as long as they pay.

    Causal: how far others draft may depend on a request's later signals (``StopRule.total_below``), so no slot gives
    way to one that was drafted after it.

    Args:
        survival: [B, longest] of the drafted tokens, as known before each was drawn.
        lens: [B]
        row_s: [B] of what a row sees of the context.
        budget: most slots.
    """
    depth, taken = np.zeros(lens.size, np.int64), 0
    for position in range(survival.shape[1]):
        going = np.flatnonzero((lens > position) & (depth == position))
        if not going.size:
            break
        gain = np.empty(going.size)
        for i in range(going.size):
            gain[i] = survival[going[i], position] * price - row_s[going[i]]
        for i in np.argsort(-gain, kind="mergesort"):
            row = row_price_s(target.knots, target.curve, target.rows + taken, 2.0 * going.size)
            if taken >= budget or gain[i] < row:
                break
            depth[going[i]] += 1
            taken += 1
    return depth
