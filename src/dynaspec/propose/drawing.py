"""Drawing draft tokens from a drafter's logits, and the columns they are collected in: on any device, and for first
choices on CPU in one compiled call.

Right after a pass the caches hold its weights, and every function the host calls next is fetched from memory: what
takes 2 µs by itself takes 10 there, several times a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints
from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.sampling import ops
from dynaspec.sampling.cpu import leaders
from dynaspec.sampling.draw import draw
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.state import SamplerState

from .ngram import gather_signal
from .stopping import CompiledRule, apply_rule, compiled_rule, stop_mask

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_NO_RULE = StopRule(below=(0.0,))
_EVERYTHING = np.empty(0, np.int64)
_ABSENT = -1e9
"""Logit of tokens that a drafter does not know. Finite: a grammar may leave only such, of which any may be drafted."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Logits of a part of the vocabulary as logits of all of it, which is what processors work on."""

    vocab_size: int
    places: torch.Tensor
    """[V] the target's ids, on the logits' device."""

    @classmethod
    def over(cls, vocabulary: Ints | None, vocab_size: int, device: torch.device) -> Spread | None:
        """See ``passes.draft_passes``; None where there is nothing to do."""
        return None if vocabulary is None else cls(vocab_size, torch.from_numpy(vocabulary).to(device))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """[r, V] → [r, vocab_size]"""
        spread = logits.new_full((logits.shape[0], self.vocab_size), _ABSENT)
        spread[:, self.places] = logits
        return spread


class Drawn:
    """Satisfies ``passes.DraftPasses`` on any device, each part by itself: drawing, and the stop rule.

    Tokens, signals and distributions stay on the device: between two passes the host reads a token only where a
    processor must see it.
    """

    choices = None

    def __init__(
        self,
        sampler: SamplerState,
        batch: DecodeBatch,
        requests: Ints,
        granted: Ints,
        rule: StopRule | None,
        vocab_size: int,
        device: torch.device,
        vocabulary: Ints | None = None,
        *,
        most_probable: bool,
        first_choice: bool,
    ) -> None:
        """See ``passes.draft_passes``.

        Args:
            most_probable: every token is the one with the largest score.
            first_choice: that score is the drafter's own.
        """
        lanes = batch.lanes
        self._sampler = sampler
        self._batch = batch
        self._lanes = lanes
        self._requests = requests
        self._rule = rule
        self._vocab_size = vocab_size
        self._most_probable = most_probable
        self._first_choice = first_choice
        self._spread = Spread.over(vocabulary, vocab_size, device)
        self._mask = stop_mask(rule, granted, device)
        self._tokens = torch.zeros(lanes.size, int(granted.max(initial=0)), dtype=torch.int64, device=device)
        self._confidence = torch.zeros_like(self._tokens, dtype=torch.float32)
        self._signal: torch.Tensor | None = None
        self._repeat_bonus: npt.NDArray[np.float32] | None = None
        self._seen = ops.to_host(self._tokens)
        """The tokens as processors see them; on CPU the very same memory."""
        self._mirror = device.type != "cpu" and sampler.reads_drafts(lanes)
        self._q: torch.Tensor | None = None

    def take(self, logits: torch.Tensor, running: Ints, done: int) -> Ints:
        if self._spread is not None:
            logits = self._spread(logits)
        self._mask.update(done, running, self._draw(logits, self._requests[running], done - 1))
        return self._mask.running(done)

    def _draw(self, logits: torch.Tensor, requests: Ints, position: int) -> torch.Tensor:
        """Draws token ``position`` (0-based) of each request.

        The signal is the largest probability of the raw softmax, before temperature or any processor; or the drawn
        token's, or the signal, where the rule asks for that.

        Args:
            logits: [r, V] of the drafter, raw.
            requests: [r] places in the batch.

        Returns:
            The signal [r] float32, on the logits' device.
        """
        rule = self._rule
        first, chance, lead = ops.leaders(logits)
        confidence = chance
        tokens, q = first, None
        if not self._first_choice:
            depth = np.full(requests.size, position, dtype=np.int64)
            rows = Rows(self._lanes[requests], requests, depth, self._seen)
            scores = self._sampler.process(logits, rows)
            if self._most_probable:
                tokens = ops.argmax(scores)
            else:
                tokens, q = draw(scores, rows, self._sampler, Purpose.DRAFT)
        if rule is not None and rule.signal == "token_prob" and tokens is not first:
            confidence = ops.probability(logits, tokens)
        _put(self._tokens, requests, position, tokens)
        _put(self._confidence, requests, position, confidence)
        if self._mirror:
            self._seen[requests, position] = ops.to_host(tokens)
        if q is not None:
            if self._q is None:
                self._q = q.new_zeros(*self._tokens.shape, self._vocab_size)
            _put(self._q, requests, position, q)
        if rule is None or rule.signal != "survival":
            return confidence
        return self._gather_signal(lead, chance, requests, position)

    def _gather_signal(self, lead: torch.Tensor, chance: torch.Tensor, requests: Ints, position: int) -> torch.Tensor:
        """[r] How far the drafter's first choice is ahead of the others, and whether the text has gone on so before.

        The second part reads the tokens, so on a GPU, where the host would have to wait for them, it is left out.
        """
        if self._signal is None:
            self._signal = torch.zeros_like(self._confidence)
        if lead.device.type != "cpu":
            signal = ahead_on_device(lead, chance)
            _put(self._signal, requests, position, signal)
            return signal
        if self._repeat_bonus is None:
            self._repeat_bonus = np.zeros(self._seen.shape, np.float32)
        gathered = gather_signal(
            lead.numpy(),
            chance.numpy(),
            self._batch.tokens,
            self._lanes,
            self._batch.lengths,
            self._seen,
            requests,
            position,
            self._signal.numpy(),
            self._repeat_bonus,
        )
        return torch.from_numpy(gathered)

    def tokens(self, requests: Ints, position: int) -> torch.Tensor:
        return _get(self._tokens, requests, position)

    def confidence(self, requests: Ints, position: int) -> npt.NDArray[np.float32]:
        return _get(self._confidence, requests, position).cpu().numpy()

    def finish(self, granted: Ints) -> Drafts:
        drafts = _cut(ops.to_host(self._tokens), self._requests, self._mask.lengths(), granted)
        drafts.confidence = self._confidence.cpu().numpy()
        drafts.signal = None if self._signal is None else self._signal.cpu().numpy()
        drafts.repeat_bonus, drafts.q = self._repeat_bonus, self._q
        return drafts


def ahead_on_device(lead: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
    """``ngram.ahead`` of every row [r], cut to ``LOGIT_RANGE``, without the host."""
    over_all = confidence.logit().clamp(-LOGIT_RANGE, LOGIT_RANGE)
    return 0.5 * (lead.clamp(max=LOGIT_RANGE) + over_all)


def _cut(tokens: npt.NDArray[np.int64], requests: Ints, lengths: Ints, granted: Ints) -> Drafts:
    """Drafts of these lengths, without their signals.

    Args:
        tokens: [B, longest] zeroed behind the ends.
        requests: [A] places of those that drafted; others have length 0.
        lengths: [A]
        granted: [B] lengths asked for.
    """
    lens = np.zeros(granted.size, dtype=np.int64)
    lens[requests] = lengths
    early_exit = np.zeros(granted.size, dtype=np.bool_)
    early_exit[requests] = lengths < granted[requests]
    tokens[np.arange(tokens.shape[1]) >= lens[:, None]] = 0
    return Drafts(tokens, lens, early_exit=early_exit)


# numpy indexes small tables several times faster than torch.


def _put(table: torch.Tensor, requests: Ints, position: int, values: torch.Tensor) -> None:
    """table[requests, position] = values"""
    if table.device.type == "cpu":
        table.numpy()[requests, position] = values.numpy()
    else:
        table[torch.from_numpy(requests).to(table.device), position] = values


def _get(table: torch.Tensor, requests: Ints, position: int) -> torch.Tensor:
    """table[requests, position]"""
    if table.device.type == "cpu":
        return torch.from_numpy(table.numpy()[requests, position])
    return table[torch.from_numpy(requests).to(table.device), position]


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
    """The same, where the rule looks at survival."""
    rule: CompiledRule
    """With an entry for each of ``requests``."""


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
        signals = np.zeros((2, *(shape if rule.signal == "survival" else (0, 0))), np.float32)
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
            rule=compiled_rule(rule, granted.copy()),
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
        drafts = _cut(made.tokens, made.requests, made.rule.lengths, granted)
        drafts.confidence = made.confidence
        if made.rule.survives:
            drafts.signal, drafts.repeat_bonus = made.signal, made.repeat_bonuses
        return drafts


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
    signal = probability
    if choices.rule.survives:
        signal = gather_signal(
            lead,
            probability,
            choices.texts,
            choices.lanes,
            choices.lengths,
            choices.tokens,
            places,
            position,
            choices.signal,
            choices.repeat_bonuses,
        )
    apply_rule(choices.rule, running, signal, done)
    return np.flatnonzero(choices.rule.lengths > done)
