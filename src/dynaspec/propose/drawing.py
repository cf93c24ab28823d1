"""Drawing draft tokens from a drafter's logits, and the columns they are collected in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints
from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.sampling import ops
from dynaspec.sampling.draw import draw
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.rows import Rows
from dynaspec.sampling.state import SamplerState

from .ngram import gather_signal

REPEAT_WEIGHT = 0.2
"""Weight, in the signal, of a token that goes on as the text did before, beside how far the first choice is ahead; what
both are worth is learnt (``StopRule.weight``)."""
REPEAT_MATCH = 8
"""Tokens before it that are compared at most."""


class DraftColumns:
    """Tokens, signals and distributions of one propose call, filled one draft position a pass.

    They stay on the device: between two passes the host reads a token only where a processor must see it.
    """

    def __init__(
        self,
        sampler: SamplerState,
        batch: DecodeBatch,
        width: int,
        vocab_size: int,
        device: torch.device,
        *,
        most_probable: bool,
        first_choice: bool,
    ) -> None:
        """
        Args:
            width: longest draft.
            most_probable: every token is the one with the largest score.
            first_choice: that score is the drafter's own.
        """
        lanes = batch.lanes
        self._sampler = sampler
        self._batch = batch
        self._lanes = lanes
        self._vocab_size = vocab_size
        self._most_probable = most_probable
        self._first_choice = first_choice
        self._tokens = torch.zeros(lanes.size, width, dtype=torch.int64, device=device)
        self._confidence = torch.zeros(lanes.size, width, device=device)
        self._signal: torch.Tensor | None = None
        self._repeat_bonus: npt.NDArray[np.float32] | None = None
        self._seen = ops.to_host(self._tokens)
        """The tokens as processors see them; on CPU the very same memory."""
        self._mirror = device.type != "cpu" and sampler.reads_drafts(lanes)
        self._q: torch.Tensor | None = None

    def draw(self, logits: torch.Tensor, requests: Ints, position: int, rule: StopRule | None) -> torch.Tensor:
        """Draws token ``position`` (0-based) of each request.

        The signal is the largest probability of the raw softmax, before temperature or any processor; or the drawn
        token's, or the signal, where the rule asks for that.

        Args:
            logits: [r, V] of the drafter, raw.
            requests: [r] places in the batch.

        Returns:
            The signal [r] float32, on the logits' device.
        """
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
            LOGIT_RANGE,
            self._batch.tokens,
            self._lanes,
            self._batch.lengths,
            self._seen,
            requests,
            position,
            REPEAT_MATCH,
            REPEAT_WEIGHT,
            self._signal.numpy(),
            self._repeat_bonus,
        )
        return torch.from_numpy(gathered)

    def tokens(self, requests: Ints, position: int) -> torch.Tensor:
        """[r] int64 drafted at ``position``, on the device."""
        return _get(self._tokens, requests, position)

    def confidence(self, requests: Ints, position: int) -> npt.NDArray[np.float32]:
        """[r] the confidence in the tokens at ``position``, on the host; waits for the device."""
        return _get(self._confidence, requests, position).cpu().numpy()

    def finish(self, requests: Ints, lengths: Ints, granted: Ints) -> Drafts:
        """The drafts, cut to their final lengths.

        Args:
            requests: [A] places of those that drafted; others have length 0.
            lengths: [A]
            granted: [B] lengths asked for.
        """
        drafts = cut(ops.to_host(self._tokens), requests, lengths, granted)
        drafts.confidence = self._confidence.cpu().numpy()
        drafts.signal = None if self._signal is None else self._signal.cpu().numpy()
        drafts.repeat_bonus, drafts.q = self._repeat_bonus, self._q
        return drafts


def ahead_on_device(lead: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
    """``ngram.ahead`` of every row [r], cut to ``LOGIT_RANGE``, without the host."""
    over_all = confidence.logit().clamp(-LOGIT_RANGE, LOGIT_RANGE)
    return 0.5 * (lead.clamp(max=LOGIT_RANGE) + over_all)


def cut(tokens: npt.NDArray[np.int64], requests: Ints, lengths: Ints, granted: Ints) -> Drafts:
    """Drafts of these lengths, without their signals.

    Args:
        tokens: [B, longest] zeroed behind the ends.
        requests, lengths, granted: see ``DraftColumns.finish``.
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
