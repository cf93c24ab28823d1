"""Drafts of first choices on CPU: all that follows a pass's logits is one compiled call.

Right after a pass the caches hold its weights, and every function the host calls next is fetched from memory: what
takes 2 µs by itself takes 10 there, several times a pass.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints
from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.sampling.compiled import kernel
from dynaspec.sampling.cpu import leaders

from .drawing import ECHO_MATCH, ECHO_WEIGHT, cut
from .match import gather_evidence
from .stopping import at_pass, stop, survive_or_stop

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_NO_RULE = StopRule(below=(0.0,))


class FirstChoices:
    """Satisfies ``passes.DraftPasses`` where every token is the one with the drafter's largest logit."""

    def __init__(self, batch: DecodeBatch, requests: Ints, granted: Ints, rule: StopRule | None) -> None:
        """See ``passes.draft_passes``."""
        shape = batch.lanes.size, int(granted.max(initial=0))
        self._batch = batch
        self._requests = requests
        self._rule = rule or _NO_RULE
        self._survives = rule is not None and rule.signal == "survival"
        # Confidences are compared in their own precision.
        self._below = self._rule.below if self._survives else tuple(np.array(self._rule.below, np.float32).tolist())
        self._lengths = granted.copy()
        self._tokens = np.zeros(shape, np.int64)
        self._confidence = np.zeros(shape, np.float32)
        self._evidence, self._echo = np.zeros((2, *(shape if self._survives else (0, 0))), np.float32)
        self._chance = np.ones(granted.size)
        self._offset = np.array(self._rule.offset) if self._rule.offset else np.zeros(granted.size)

    def take(self, logits: torch.Tensor, running: Ints, done: int) -> Ints:
        rule, batch = self._rule, self._batch
        going_on: Ints = take_first(
            logits.numpy(),
            self._requests,
            running,
            done,
            batch.tokens,
            batch.lanes,
            batch.lengths,
            self._tokens,
            self._confidence,
            self._evidence,
            self._echo,
            self._survives,
            rule.weight,
            at_pass(rule.bias, done),
            self._chance,
            self._offset,
            at_pass(self._below, done),
            at_pass(rule.total_below, done) if rule.total_below else -np.inf,
            rule.scope == "batch_mean",
            self._lengths,
        )
        return going_on

    def tokens(self, requests: Ints, position: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[requests, position])

    def confidence(self, requests: Ints, position: int) -> Float32:
        confidence: Float32 = self._confidence[requests, position]
        return confidence

    def finish(self, granted: Ints) -> Drafts:
        drafts = cut(self._tokens, self._requests, self._lengths, granted)
        drafts.confidence = self._confidence
        if self._survives:
            drafts.evidence, drafts.echo = self._evidence, self._echo
        return drafts


@kernel
def take_first(
    logits: Float32,
    requests: Int64,
    running: Int64,
    done: int,
    texts: npt.NDArray[np.int32],
    lanes: Int64,
    text_lengths: Int64,
    tokens: Int64,
    confidence: Float32,
    evidence: Float32,
    echoes: Float32,
    survives: bool,
    weight: float,
    bias: float,
    chance: Float64,
    offset: Float64,
    below: float,
    total_below: float,
    together: bool,
    lengths: Int64,
) -> Int64:
    """Token number ``done`` of the rows ``running``, and the stop rule.

    Args:
        logits: [r, V]
        requests: [A] places in the batch.
        running: [r] rows: indices into ``requests``.
        texts, lanes, text_lengths: see ``match.gather_evidence``.
        tokens, confidence: [B, ≥ done] out.
        evidence, echoes: the same, written where ``survives``.
        survives: the rule looks at ``chance`` [A], else at the confidence; ``weight``, ``bias``, ``offset`` [A] and
            what follows as in ``stopping``.
        lengths: [A] out: of the drafts.

    Returns:
        The rows that go on.
    """
    rows, position = running.size, done - 1
    first, probability, lead = np.empty(rows, np.int64), np.empty(rows, np.float32), np.empty(rows, np.float32)
    leaders(logits, first, probability, lead)
    places = requests[running]
    for n in range(rows):
        tokens[places[n], position] = first[n]
        confidence[places[n], position] = probability[n]
    if survives:
        signal = gather_evidence(
            lead,
            LOGIT_RANGE,
            texts,
            lanes,
            text_lengths,
            tokens,
            places,
            position,
            ECHO_MATCH,
            ECHO_WEIGHT,
            evidence,
            echoes,
        )
        survive_or_stop(lengths, running, chance, signal, weight, bias, offset, done, below, total_below, together)
    else:
        stop(lengths, running, probability, done, below, total_below, together)
    return np.flatnonzero(lengths > done)
