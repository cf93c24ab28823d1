"""N-gram lookup, also called prompt lookup: drafts what followed when the text's end occurred before (Saxena, "Prompt
Lookup Decoding", 2023).

Its search is compiled, and also serves other proposers: whether a drafted token repeats the text speaks for it or
against it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import copy_row, njit
from dynaspec.contract.proposer import DecodeBatch, Drafts, Offers, ProposerNeeds
from dynaspec.contract.step import LOGIT_RANGE, ProposerTraits, SpecPlan

from .guard import Stateless

_PEEK_TOKENS = 64
REPEAT_WEIGHT = 0.2
"""Weight, in the signal, of a token that goes on as the text did before, beside how far the first choice is ahead; what
both are worth is learnt (``StopRule.weight``)."""
REPEAT_MATCH = 8
"""Tokens before it that are compared at most."""


@njit(cache=True, nogil=True)
def longest_match(tokens: npt.NDArray[np.int32], length: int, min_n: int, max_n: int, wanted: int) -> tuple[int, int]:
    """Where the end of a text has occurred before.

    Prefers the longest match of the text's last ``min_n`` … ``max_n`` tokens; among equals one that ``wanted``
    tokens follow (or as many as there are), among those the most recent.

    Args:
        tokens: [≥ length] the text.

    Returns:
        (length of the match, index of the token that follows it); (0, length) if there is none.
    """
    best_n, best_follow, best_next = 0, 0, length
    for end in range(length - 2, min_n - 2, -1):
        n = 0
        while n < max_n and n <= end and tokens[end - n] == tokens[length - 1 - n]:
            n += 1
        follow = min(length - 1 - end, wanted)
        if n >= min_n and (n > best_n or (n == best_n and follow > best_follow)):
            best_n, best_follow, best_next = n, follow, end + 1
            if n == max_n and follow == wanted:
                break
    return best_n, best_next


@njit(cache=True, nogil=True)
def longest_matches(
    tokens: npt.NDArray[np.int32],
    lanes: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    min_n: int,
    max_n: int,
    wanted: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``longest_match`` of several texts.

    Args:
        tokens: [lanes, ≥ length]
        lanes, lengths: [B]

    Returns:
        [B, 2] length of the match, and number of tokens that follow it, ``wanted`` at most; [B, wanted] these tokens.
    """
    out, following = np.empty((lanes.size, 2), np.int64), np.zeros((lanes.size, wanted), np.int64)
    for r in range(lanes.size):
        n, start = longest_match(tokens[lanes[r]], lengths[r], min_n, max_n, wanted)
        out[r, 0], out[r, 1] = n, min(lengths[r] - start, wanted)
        copy_row(tokens[lanes[r], start : start + out[r, 1]], following[r])
    return out, following


@njit(cache=True, nogil=True)
def repeat_bonus(
    text: npt.NDArray[np.int32], length: int, draft: npt.NDArray[np.int64], position: int, max_n: int
) -> float:
    """Whether a text goes on with a drafted token where it was the same before.

    The text and the draft so far end in n tokens (n ≤ ``max_n``) that occurred before in it: + log2(1 + n) if this
    token followed the longest and most recent such occurrence, − log2(1 + n) if another did; 0 if there is none.

    Args:
        text: [≥ length].
        draft: [> position] drafted tokens.
        position: of the token in question, from 0.
    """
    total = length + position
    best, follower = 0, np.int64(-1)
    last = draft[position - 1] if position else np.int64(text[length - 1])
    for end in range(total - 2, -1, -1):
        if (np.int64(text[end]) if end < length else draft[end - length]) != last:
            continue
        n = 1
        while n < max_n and n <= end:
            at, other = end - n, total - 1 - n
            here = np.int64(text[at]) if at < length else draft[at - length]
            there = np.int64(text[other]) if other < length else draft[other - length]
            if here != there:
                break
            n += 1
        if n > best:
            best = n
            follower = np.int64(text[end + 1]) if end + 1 < length else draft[end + 1 - length]
            if n == max_n:
                break
    if not best:
        return 0.0
    return float(np.log2(1.0 + best) * (1.0 if follower == draft[position] else -1.0))


@njit(cache=True, nogil=True)
def ahead(lead: float, confidence: float) -> float:
    """How far a drafter's first choice is ahead of the others, in log-odds: the mean of its lead over the second alone
    and of that over all others together, each cut to ± ``LOGIT_RANGE``. The two err differently.

    Args:
        lead: ln(p₁/p₂).
        confidence: p₁.
    """
    over_all = np.log(confidence / (1.0 - confidence)) if confidence < 1.0 else LOGIT_RANGE
    return float(0.5 * (min(lead, LOGIT_RANGE) + min(max(over_all, -LOGIT_RANGE), LOGIT_RANGE)))


@njit(cache=True, nogil=True)
def gather_signal(
    lead: npt.NDArray[np.float32],
    confidence: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int32],
    lanes: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    drafts: npt.NDArray[np.int64],
    requests: npt.NDArray[np.int64],
    position: int,
    signal: npt.NDArray[np.float32],
    repeat_bonuses: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """``ahead`` + ``REPEAT_WEIGHT`` · repeat_bonus of token ``position`` of each of ``requests``.

    Args:
        lead, confidence: [r] see ``ahead``.
        tokens: [lanes, ≥ length] the texts.
        lanes, lengths: [B]
        drafts: [B, > position]
        requests: [r] places in the batch.
        signal, repeat_bonuses: [B, > position] out: the sum, and its second part.

    Returns:
        [r] the sum.
    """
    out = np.empty(requests.size, np.float32)
    for i in range(requests.size):
        r = requests[i]
        own = np.float32(REPEAT_WEIGHT * repeat_bonus(tokens[lanes[r]], lengths[r], drafts[r], position, REPEAT_MATCH))
        out[i] = np.float32(ahead(lead[i], confidence[i])) + own
        signal[r, position], repeat_bonuses[r, position] = out[i], own
    return out


class NgramProposer(Stateless):
    """Looks the last tokens up in the request's own prompt and output."""

    traits = ProposerTraits(name="ngram", passes_per_draft="none", has_confidence=False)
    needs = ProposerNeeds()

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n

    def peek(self, batch: DecodeBatch) -> Offers:
        where = batch.tokens, batch.lanes, batch.lengths
        return Offers(*longest_matches(*where, self._min_n, self._max_n, _PEEK_TOKENS))

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        drafts = Drafts(
            tokens=np.zeros((len(plan.depth), max(plan.depth, default=0)), dtype=np.int64),
            lens=np.zeros(len(plan.depth), dtype=np.int64),
            early_exit=np.zeros(len(plan.depth), dtype=np.bool_),
            skipped={},
        )
        for i, depth in enumerate(plan.depth):
            if depth:
                self._look_up(batch, i, depth, drafts)
        return drafts

    def _look_up(self, batch: DecodeBatch, i: int, depth: int, drafts: Drafts) -> None:
        text, length = batch.tokens[batch.lanes[i]], int(batch.lengths[i])
        n, start = longest_match(text, length, self._min_n, self._max_n, depth)
        found = min(depth, length - start)
        if n == 0 and drafts.skipped is not None:
            drafts.skipped[batch.ids[i]] = "no_match"
        drafts.tokens[i, :found] = text[start : start + found]
        drafts.lens[i] = found
