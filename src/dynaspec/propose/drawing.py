"""Drawing draft tokens from a drafter's logits, and the columns they are collected in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.proposer import Drafts, Ints
from dynaspec.contract.step import StopRule
from dynaspec.sampling import ops
from dynaspec.sampling.draw import draw
from dynaspec.sampling.rng import Purpose
from dynaspec.sampling.rows import Rows
from dynaspec.sampling.state import SamplerState


class DraftColumns:
    """Tokens, signals and distributions of one propose call, filled one draft position a pass.

    They stay on the device: between two passes the host reads a token only where a processor must see it.
    """

    def __init__(
        self,
        sampler: SamplerState,
        lanes: Ints,
        width: int,
        vocab_size: int,
        device: torch.device,
        *,
        probabilistic: bool,
    ) -> None:
        """
        Args:
            lanes: [B] of the whole batch.
            width: longest draft.
        """
        self._sampler = sampler
        self._lanes = lanes
        self._vocab_size = vocab_size
        self._most_probable = not probabilistic or bool(sampler.greedy[lanes].all())
        """Every token is the one with the largest score."""
        self._tokens = torch.zeros(lanes.size, width, dtype=torch.int64, device=device)
        self._signal = torch.zeros(lanes.size, width, device=device)
        self._seen = ops.to_host(self._tokens)
        """The tokens as processors see them; on CPU the very same memory."""
        self._mirror = device.type != "cpu" and sampler.reads_drafts(lanes)
        self._q: torch.Tensor | None = None

    def draw(self, logits: torch.Tensor, requests: Ints, position: int, rule: StopRule | None) -> torch.Tensor:
        """Draws token ``position`` (0-based) of each request.

        The signal is the largest probability of the raw softmax, before temperature or any processor; or the drawn
        token's, where the rule asks for that.

        Args:
            logits: [r, V] of the drafter, raw.
            requests: [r] places in the batch.

        Returns:
            The signal [r] float32, on the logits' device.
        """
        depth = np.full(requests.size, position, dtype=np.int64)
        rows = Rows(self._lanes[requests], requests, depth, self._seen)
        scores = self._sampler.process(logits, rows)
        if self._most_probable:
            tokens, q = ops.argmax(scores), None
        else:
            tokens, q = draw(scores, rows, self._sampler, Purpose.DRAFT)
        drawn_counts = rule is not None and rule.signal == "token_prob"
        is_largest = self._most_probable and scores is logits
        signal = ops.probability(logits, tokens if drawn_counts or is_largest else ops.argmax(logits))
        _put(self._tokens, requests, position, tokens)
        _put(self._signal, requests, position, signal)
        if self._mirror:
            self._seen[requests, position] = ops.to_host(tokens)
        if q is not None:
            if self._q is None:
                self._q = q.new_zeros(*self._tokens.shape, self._vocab_size)
            _put(self._q, requests, position, q)
        return signal

    def tokens(self, requests: Ints, position: int) -> torch.Tensor:
        """[r] int64 drafted at ``position``, on the device."""
        return _get(self._tokens, requests, position)

    def confidence(self, requests: Ints, position: int) -> npt.NDArray[np.float32]:
        """[r] the signal of the tokens at ``position``, on the host; waits for the device."""
        return _get(self._signal, requests, position).cpu().numpy()

    def finish(self, requests: Ints, lengths: Ints, granted: Ints) -> Drafts:
        """The drafts, cut to their final lengths.

        Args:
            requests: [A] places of those that drafted; others have length 0.
            lengths: [A]
            granted: [B] lengths asked for.
        """
        lens = np.zeros(self._lanes.size, dtype=np.int64)
        lens[requests] = lengths
        early_exit = np.zeros(self._lanes.size, dtype=np.bool_)
        early_exit[requests] = lengths < granted[requests]
        tokens = ops.to_host(self._tokens)
        tokens[np.arange(tokens.shape[1]) >= lens[:, None]] = 0
        return Drafts(tokens, lens, confidence=self._signal.cpu().numpy(), q=self._q, early_exit=early_exit)


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
