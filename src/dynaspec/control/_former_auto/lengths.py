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

from .parts import row_on_the_way_s, row_s, rows_s

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@njit(cache=True, nogil=True)
def _chance(bias: Floats, offset: float, position: int) -> float:
    """Of a slot, given that all before it were accepted."""
    return float(1.0 / (1.0 + np.exp(-(bias[min(position, bias.size - 1)] + offset))))


@njit(cache=True, nogil=True)
def hopeful(bias: Floats, variance: Floats, deviations: float) -> Floats:
    """The biases if they are so many standard deviations better than estimated."""
    out = np.empty(bias.size)
    for j in range(bias.size):
        out[j] = bias[j] + deviations * np.sqrt(variance[j])
    return out


def reading_s(price: float, lag: float, room: float, horizon: float) -> float:
    """Seconds that reading what a drafter lacks of a request takes, as a share of each step that is left to it.

    Args:
        price: seconds for each of the ``lag`` tokens.
        room: tokens that the request still has, of which a step emits two or so.
        horizon: most steps.
    """
    return price * lag / min(max(room / 2.0, 1.0), horizon)


_reading_s = njit(cache=True, nogil=True)(reading_s)


@njit(cache=True, nogil=True)
def chain_depths(
    bias: Floats,
    variance: Floats,
    optimism: float,
    offsets: Floats,
    places: Ints,
    cap: Ints,
    runnable: npt.NDArray[np.bool_],
    lag: Ints,
    room: Ints,
    horizon: float,
    context: Ints,
    value: float,
    draft: Floats,
    single_pass: bool,
    target: Floats,
    base_rows: float,
    depth: Ints,
    worth: Floats,
) -> tuple[float, float, float, float, float]:
    """Draft lengths for a proposer that needs a pass for each token, or one for all.

    Pass j runs for the requests whose slot j pays for its own rows; the passes are as many as bring most in sum.
    Reading what the drafter lacks of a request is paid off over the steps that it has left.

    Args:
        bias, variance, offsets: of the acceptance model without a feature.
        optimism: standard deviations by which acceptance may be better than estimated.
        places: [B] of the requests in ``offsets``.
        cap: [B] longest draft of each request.
        runnable: [longest + 1] draft lengths that the host can run.
        lag: [B] committed tokens that the drafter lacks.
        room: [B] tokens that each request still has.
        horizon: most steps to pay off what is read in.
        context: [B] KV entries that a row of each request sees.
        value: seconds that a token is worth.
        draft, target: parts of the costs, see ``StepCosts``.
        base_rows: rows of the target pass without drafts.
        depth: [B] out, the lengths.
        worth: [B] out, seconds that drafting for each request brings, its share of the passes paid.

    Returns:
        Accepted tokens hoped for, and expected at the best estimate; seconds of drafting; target rows and KV entries
        on top.
    """
    requests = cap.size
    hoped_bias = hopeful(bias, variance, optimism)
    call, each = draft[0] + draft[4], draft[1]
    if single_pass:
        call, each = call + each, 0.0
    longest = 0
    reach, gain, lag_s = np.ones(requests), np.zeros(requests), np.empty(requests)
    running, paid = np.empty(requests, np.bool_), np.zeros(requests, np.int64)
    for r in range(requests):
        longest = max(longest, cap[r])
        depth[r], worth[r] = 0, 0.0
        running[r] = cap[r] > 0
        lag_s[r] = _reading_s(draft[3], lag[r], room[r], horizon)
        gain[r] = -lag_s[r]
    profit, best_profit, passes, unpaid = -call, 0.0, 0, 0.0
    rows = base_rows
    for j in range(longest):
        count = 0
        for r in range(requests):
            running[r] = running[r] and cap[r] > j
            count += running[r]
        if count == 0:
            break
        row = rows_s(target, rows, rows + count) / count  # of all that this pass drafts, tiles begun by some included
        for r in range(requests):
            if running[r]:
                reach[r] *= _chance(hoped_bias, offsets[places[r]], j)
                gain[r] += reach[r] * value - draft[2] - row - target[target.size - 1] * context[r]
        unpaid += each
        if runnable[j + 1]:  # what was gained since the last length that can run decides
            for r in range(requests):
                if running[r] and gain[r] <= 0.0:
                    running[r] = False
                    count -= 1
            for r in range(requests):
                if running[r]:
                    worth[r] += gain[r] - unpaid / count
                    profit += gain[r]
                    gain[r], paid[r] = 0.0, j + 1
            profit -= unpaid
            unpaid = 0.0
            if profit > best_profit:
                best_profit, passes = profit, j + 1
                depth[:] = paid
        rows += count
    if passes == 0:
        return 0.0, 0.0, 0.0, 0.0, 0.0
    drafted, seen, ingesting = 0.0, 0.0, 0.0
    for r in range(requests):
        drafted += depth[r]
        seen += depth[r] * context[r]
        ingesting += lag_s[r] if depth[r] else 0.0
    hoped = expected_tokens(hoped_bias, offsets, places, depth)
    expected = expected_tokens(bias, offsets, places, depth)
    return hoped, expected, call + each * passes + draft[2] * drafted + ingesting, drafted, seen


@njit(cache=True, nogil=True)
def match_feature(match: int, position: int) -> float:
    """What speaks for token ``position`` of a draft that was found by so long a match: log₂ of half the tokens that
    agree if all before it are right, for they are part of the match then."""
    return float(np.log2(max(match + position, 1) / 2.0))


@njit(cache=True, nogil=True)
def match_features(match: Ints, lens: Ints) -> Floats:
    """[N] ``match_feature`` of all drafted tokens, one request after the other; match, lens [B]."""
    out = np.empty(lens.sum())
    n = 0
    for r in range(lens.size):
        for j in range(lens[r]):
            out[n] = match_feature(match[r], j)
            n += 1
    return out


@njit(cache=True, nogil=True)
def lookup_depths(
    weight: float,
    bias: Floats,
    variance: Floats,
    optimism: float,
    offsets: Floats,
    places: Ints,
    offers: Ints,
    cap: Ints,
    context: Ints,
    value: float,
    instead: Floats,
    target: Floats,
    base_rows: float,
    depth: Ints,
    worth: Floats,
) -> tuple[float, float, float, float]:
    """Draft lengths for a proposer that costs next to nothing but the target's rows.

    Args:
        weight: of the match in the acceptance model, see ``match_feature``; for the others see ``chain_depths``.
        offers: [B, 2] tokens that agree where the draft was found, 0 = none was; and tokens that follow there.
        instead: [B] seconds that something else would bring each request; it gets nothing here if that is more.
        depth, worth: [B] out.

    Returns:
        Accepted tokens hoped for, and expected at the best estimate; target rows and KV entries on top.
    """
    hoped_bias = hopeful(bias, variance, optimism)
    hoped, expected, rows, seen = 0.0, 0.0, base_rows, 0.0
    for r in range(cap.size):
        depth[r], worth[r] = 0, 0.0
        reach, likely, hoped_here, expected_here = 1.0, 1.0, 0.0, 0.0
        match = offers[r, 0]
        for j in range(min(cap[r], offers[r, 1]) if match else 0):
            price = row_s(target, rows + j) + target[target.size - 1] * context[r]
            shift = weight * match_feature(match, j) + offsets[places[r]]
            reach *= _chance(hoped_bias, shift, j)
            if reach * value <= price:
                break
            likely *= _chance(bias, shift, j)
            worth[r] += reach * value - price
            hoped_here, expected_here = hoped_here + reach, expected_here + likely
            depth[r] = j + 1
        if worth[r] <= instead[r]:
            depth[r], worth[r] = 0, 0.0
        else:
            hoped, expected = hoped + hoped_here, expected + expected_here
            rows, seen = rows + depth[r], seen + depth[r] * context[r]
    return hoped, expected, rows - base_rows, seen


@njit(cache=True, nogil=True)
def merge_depths(
    found: Ints, lookup: int, agreed: Ints, granted: Ints, value: float, row: float, parts: Floats, owner: Ints
) -> tuple[int, float]:
    """Gives the requests without a match to the model, if its passes pay for those alone.

    Args:
        found: [B] lengths that a lookup drafts, and out: the lengths of all.
        lookup: its index among the proposers.
        agreed: [B] lengths expected of the model; 0 throughout = it does not draft.
        granted: [B] most that it may draft.
        value: seconds that a token is worth.
        row: seconds that a target row takes.
        parts: [3] accepted tokens expected of the model, its target rows, seconds of its passes, for all requests.
        owner: [B] the model's requests' proposers, and out: everyone's.

    Returns:
        Requests that lookups draft for; share of the model's drafts that is left, 0 if it does not draft.
    """
    rest, total, count = 0.0, 0.0, 0
    for r in range(found.size):
        total += agreed[r]
        if found[r]:
            owner[r] = lookup
            count += 1
        else:
            rest += agreed[r]
    kept = rest / total if total else 0.0
    if kept * (parts[0] * value - parts[1] * row) <= parts[2]:
        return count, 0.0
    for r in range(found.size):
        if not found[r]:
            found[r] = granted[r]
    return count, kept


@njit(cache=True, nogil=True)
def expected_tokens(bias: Floats, offsets: Floats, places: Ints, depth: Ints) -> float:
    """Accepted tokens expected of drafts of ``depth`` [B]; arguments as for ``chain_depths``."""
    tokens = 0.0
    for r in range(depth.size):
        reach = 1.0
        for j in range(depth[r]):
            reach *= _chance(bias, offsets[places[r]], j)
            tokens += reach
    return tokens


@njit(cache=True, nogil=True)
def stop_thresholds(
    bias: Floats,
    variance: Floats,
    optimism: float,
    value: float,
    draft: Floats,
    target: Floats,
    base_rows: float,
    context: Ints,
    cap: Ints,
) -> tuple[Floats, Floats]:
    """Survivals of a draft below which its next token does not pay for its rows, and all of them not for the pass.

    Args:
        bias, variance, optimism: see ``chain_depths``; how likely the next token is accepted if the draft is.
        value, draft, target, base_rows, context, cap: see ``chain_depths``.

    Returns:
        ``StopRule.below`` and ``total_below``, for each pass but the last one possible.
    """
    hoped_bias = hopeful(bias, variance, optimism)
    requests, seen, longest = context.size, 0.0, 2
    for r in range(requests):
        longest = max(longest, cap[r])
        seen += context[r] / requests
    own, together = np.empty(longest - 1), np.empty(longest - 1)
    for j in range(longest - 1):
        worth = value * _chance(hoped_bias, 0.0, j + 1)
        rows = base_rows + requests * (j + 1)
        row = draft[2] + rows_s(target, rows, rows + requests) / requests + target[target.size - 1] * seen
        own[j], together[j] = row / worth, draft[1] / worth
    return own, together


@njit(cache=True, nogil=True)
def survivals(weight: float, bias: Floats, offset: Floats, feature: Floats, own: Floats, lens: Ints) -> Floats:
    """Chance that each drafted token and all before it are accepted, as far as was known before it was drawn.

    Args:
        offset: [B].
        feature: [N] of the drafted tokens of all B requests, one request after the other.
        own: [N] the part of it that hangs on which token was drawn; it counts for the tokens behind only.
        lens: [B].

    Returns:
        [N]
    """
    out = np.empty(feature.size)
    n = 0
    for r in range(lens.size):
        reach = 1.0
        for j in range(lens[r]):
            rest = bias[min(j, bias.size - 1)] + offset[r]
            out[n] = reach / (1.0 + np.exp(-(weight * (feature[n] - own[n]) + rest)))
            reach /= 1.0 + np.exp(-(weight * feature[n] + rest))
            n += 1
    return out


@njit(cache=True, nogil=True)
def admit_by_survival(
    survival: Floats, lens: Ints, context: Ints, value: float, target: Floats, base_rows: float, budget: int
) -> Ints:
    """Slots to verify of each request: position by position, at each in order of survival as long as they pay.

    Causal: how far others draft may depend on a request's later confidences (``StopRule.total_below``), so no slot
    gives way to one that was drafted after it.

    Args:
        survival: [N] as ``survivals`` gives them.
        lens: [B].
        context: [B] KV entries that a row of each request sees.
        value, target, base_rows: see ``chain_depths``.
        budget: most slots.
    """
    start = np.cumsum(lens) - lens
    depth = np.zeros(lens.size, np.int64)
    taken = 0
    for position in range(lens.max() if lens.size else 0):
        rows = np.flatnonzero((lens > position) & (depth == position))
        if rows.size == 0:
            break
        most = base_rows + taken + 2 * rows.size  # as many may follow
        gain = np.empty(rows.size)
        for i in range(rows.size):
            r = rows[i]
            gain[i] = survival[start[r] + position] * value - target[target.size - 1] * context[r]
        for i in np.argsort(-gain, kind="mergesort"):
            if taken >= budget or gain[i] < row_on_the_way_s(target, base_rows + taken, most):
                break
            depth[rows[i]] += 1
            taken += 1
    return depth
