"""Drafts of first choices on CPU: all that follows a pass's logits is one compiled call.

Right after a pass the caches hold its weights, and every function the host calls next is fetched from memory: what
takes 2 µs by itself takes 10 there, several times a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import inlined, kernel
from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints
from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.sampling.cpu import leaders

from .drawing import REPEAT_MATCH, REPEAT_WEIGHT, cut
from .ngram import gather_signal
from .stopping import stop, survive_or_stop

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_NO_RULE = StopRule(below=(0.0,))
_EVERYTHING = np.empty(0, np.int64)


class Choices(NamedTuple):
    """The drafts of one propose call and the rule that ends them, for compiled code. B requests, A of them drafting."""

    texts: npt.NDArray[np.int32]
    vocabulary: Int64
    """[V] the target's ids of the tokens that logits are about; empty = all, in their order."""
    lanes: Int64
    lengths: Int64
    """[B] of the texts; see ``ngram.gather_signal``."""
    requests: Int64
    """[A] places in the batch."""
    tokens: Int64
    confidence: Float32
    """[B, longest] of the drafts."""
    signal: Float32
    repeat_bonuses: Float32
    """The same, where the rule looks at ``chance``."""
    survives: bool
    """The rule looks at ``chance`` [A], which follows from ``weight``, ``bias`` and ``offset`` [A], else at the
    confidence; see ``stopping``."""
    weight: float
    bias: Float64
    chance: Float64
    offset: Float64
    below: Float64
    total_below: Float64
    """One entry a pass, the last one goes on. −∞ = never."""
    together: bool
    drafted: Int64
    """[A] tokens of each draft; those granted, as long as it has not ended."""


class FirstChoices:
    """Satisfies ``passes.DraftPasses`` where every token is the one with the drafter's largest logit."""

    def __init__(
        self,
        batch: DecodeBatch,
        requests: Ints,
        granted: Ints,
        rule: StopRule | None,
        vocabulary: Ints | None = None,
    ) -> None:
        """See ``passes.draft_passes``."""
        shape = batch.lanes.size, int(granted.max(initial=0))
        rule = rule or _NO_RULE
        survives = rule.signal == "survival"
        signals = np.zeros((2, *(shape if survives else (0, 0))), np.float32)
        # Confidences are compared in their own precision.
        below = np.array(rule.below, np.float64 if survives else np.float32).astype(np.float64)
        self.choices = Choices(
            texts=batch.tokens,
            vocabulary=_EVERYTHING if vocabulary is None else vocabulary,
            lanes=batch.lanes,
            lengths=batch.lengths,
            requests=requests,
            tokens=np.zeros(shape, np.int64),
            confidence=np.zeros(shape, np.float32),
            signal=signals[0],
            repeat_bonuses=signals[1],
            survives=survives,
            weight=rule.weight,
            bias=np.array(rule.bias or (0.0,)),
            chance=np.ones(granted.size),
            offset=np.array(rule.offset) if rule.offset else np.zeros(granted.size),
            below=below if below.size else np.zeros(1),
            total_below=np.array(rule.total_below or (-np.inf,)),
            together=rule.scope == "batch_mean",
            drafted=granted.copy(),
        )

    def take(self, logits: torch.Tensor, running: Ints, done: int) -> Ints:
        going_on: Ints = take_first(logits.numpy(), running, done, self.choices)
        return going_on

    def tokens(self, requests: Ints, position: int) -> torch.Tensor:
        return torch.from_numpy(self.choices.tokens[requests, position])

    def confidence(self, requests: Ints, position: int) -> Float32:
        confidence: Float32 = self.choices.confidence[requests, position]
        return confidence

    def finish(self, granted: Ints) -> Drafts:
        made = self.choices
        drafts = cut(made.tokens, made.requests, made.drafted, granted)
        drafts.confidence = made.confidence
        if made.survives:
            drafts.signal, drafts.repeat_bonus = made.signal, made.repeat_bonuses
        return drafts


@inlined
def _at_pass(column: Float64, done: int) -> float:
    return float(column[min(done, column.size) - 1])


@kernel
def take_first(logits: Float32, running: Int64, done: int, choices: Choices) -> Int64:
    """Token number ``done`` of the rows ``running`` [r], indices into ``Choices.requests``, and the stop rule.

    Args:
        logits: [r, V]

    Returns:
        The rows that go on.
    """
    rows, position = running.size, done - 1
    first, probability, lead = np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.float32)
    leaders(logits, first, probability, lead)
    places = choices.requests[running]
    for n in range(rows):
        known = choices.vocabulary
        choices.tokens[places[n], position] = known[first[n]] if known.size else first[n]
        choices.confidence[places[n], position] = probability[n]
    below, total_below = _at_pass(choices.below, done), _at_pass(choices.total_below, done)
    if choices.survives:
        signal = gather_signal(
            lead,
            probability,
            LOGIT_RANGE,
            choices.texts,
            choices.lanes,
            choices.lengths,
            choices.tokens,
            places,
            position,
            REPEAT_MATCH,
            REPEAT_WEIGHT,
            choices.signal,
            choices.repeat_bonuses,
        )
        survive_or_stop(
            choices.drafted,
            running,
            choices.chance,
            signal,
            choices.weight,
            _at_pass(choices.bias, done),
            choices.offset,
            done,
            below,
            total_below,
            choices.together,
        )
    else:
        stop(choices.drafted, running, probability, done, below, total_below, choices.together)
    return np.flatnonzero(choices.drafted > done)
