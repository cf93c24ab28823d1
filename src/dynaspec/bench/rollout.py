"""What a drafter would draft at every position of a text that is known.

One pass over the text gives its first guess everywhere. While a draft's tokens are right they are the text itself, so
these guesses already tell how far each draft is right; the signals of the tokens behind a mismatch need the drafts
themselves, which are drafted from all positions at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import LOGIT_RANGE
from dynaspec.kv.arena import Arena
from dynaspec.kv.rows import ragged_rows
from dynaspec.model.base import Model
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.propose.drawing import REPEAT_MATCH, REPEAT_WEIGHT, ahead_on_device
from dynaspec.propose.match import gather_signal
from dynaspec.sampling import ops

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Greedy drafts from each of the n positions of a continuation."""

    runs: Ints
    """[n] tokens of the draft that are right before the first wrong one, or before the text ends; in a draft without
    end."""
    confidence: Floats
    """[n, longest] largest probability of the drafter, at each of its first tokens."""
    signal: Floats
    """[n, longest] what the proposer says for each of these tokens, as in ``DraftView.signal``."""


@torch.inference_mode()
def draft_everywhere(drafter: Model, prompt: Sequence[int], continuation: Sequence[int], longest: int) -> Rollouts:
    """
    Args:
        continuation: the target's own greedy text.
        longest: tokens of each draft.

    Raises:
        ConfigError: text and draft are longer than the drafter's positions.
    """
    text = np.array([*prompt, *continuation], dtype=np.int64)
    if len(text) + longest > drafter.config.max_position:
        raise ConfigError(
            f"a text of {len(text)} tokens and a draft of {longest} are longer than the drafter's "
            f"{drafter.config.max_position} positions; expected shorter prompts"
        )
    lengths = np.arange(len(prompt), len(text), dtype=np.int64)
    branches = _Branches(drafter, text, lengths, longest)
    drafts = _Drafts(text, lengths, longest)
    drafts.draw(branches.first(), 0)
    for position in range(1, longest):
        drafts.draw(branches.extend(drafts.tokens[:, position - 1], position), position)
    runs = run_lengths(drafts.tokens[:, 0] == text[len(prompt) :])
    return Rollouts(runs, drafts.confidence.astype(np.float64), drafts.signal.astype(np.float64))


def run_lengths(equal: npt.NDArray[np.bool_]) -> Ints:
    """[n] → [n]: how many entries from each on are true without a break."""
    runs = np.zeros(len(equal), dtype=np.int64)
    run = 0
    for i in range(len(equal) - 1, -1, -1):
        run = run + 1 if equal[i] else 0
        runs[i] = run
    return runs


class _Branches:
    """A lane for the text, and one for each position: it shares the text's whole blocks and has its own from there."""

    def __init__(self, model: Model, text: Ints, lengths: Ints, longest: int) -> None:
        """
        Args:
            lengths: [n] tokens of the text before each draft.
        """
        self._model = model
        self._text = text
        self._lengths = lengths
        shared = -(-len(text) // BLOCK_SIZE)
        own = (BLOCK_SIZE - 1 + longest) // BLOCK_SIZE + 1
        count = len(lengths)
        self._tables = np.zeros((count + 1, shared + own), dtype=np.int32)
        self._tables[:, :shared] = np.arange(shared)
        for i, length in enumerate(lengths.tolist()):
            first = length // BLOCK_SIZE
            self._tables[i + 1, first : first + own] = shared + i * own + np.arange(own)
        blocks = shared + count * own
        self._arena = Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), model.dtype, model.device)

    def first(self) -> torch.Tensor:
        """Logits [n, V] of the drafts' first tokens."""
        zero = np.zeros(1, dtype=np.int64)
        hidden = self._forward(self._text[:-1], zero, zero, np.array([len(self._text) - 1]))
        return self._model.logits(hidden[int(self._lengths[0]) - 1 :])

    def extend(self, tokens: Ints, done: int) -> torch.Tensor:
        """Logits [n, V] of what follows ``tokens`` [n], which are those number ``done`` (1-based) of the drafts."""
        lanes = np.arange(1, len(self._lengths) + 1)
        if done > 1:
            start, count, rows = self._lengths + done - 1, np.ones_like(lanes), tokens
        else:  # the own blocks begin with what the text has in its last, unfinished block
            start = self._lengths // BLOCK_SIZE * BLOCK_SIZE
            count = self._lengths - start + 1
            tails = zip(start.tolist(), self._lengths.tolist(), tokens.tolist(), strict=True)
            rows = np.concatenate([np.append(self._text[low:high], token) for low, high, token in tails])
        hidden = self._forward(rows, lanes, start, count)
        return self._model.logits(hidden[torch.from_numpy(np.cumsum(count) - 1).to(hidden.device)])

    def _forward(self, tokens: Ints, lanes: Ints, start: Ints, count: Ints) -> torch.Tensor:
        rows = ragged_rows(self._tables, BLOCK_SIZE, lanes, start, count)
        batch = ForwardBatch(
            tokens=torch.from_numpy(np.ascontiguousarray(tokens)).to(self._model.device),
            positions=rows.positions,
            slots=rows.slots,
            query_start=rows.query_start,
            context_lens=start.astype(np.int32),
            block_tables=rows.block_tables,
        )
        return self._model.forward(batch, self._arena.layers)


class _Drafts:
    """The drafts from all positions, filled one draft position a pass, with what the proposer would tell of them."""

    def __init__(self, text: Ints, lengths: Ints, longest: int) -> None:
        self._text = text.astype(np.int32)[None]
        self._lengths = lengths
        self._rows = np.arange(len(lengths), dtype=np.int64)
        self.tokens = np.zeros((len(lengths), longest), dtype=np.int64)
        self.confidence = np.zeros(self.tokens.shape, dtype=np.float32)
        self.signal = np.zeros(self.tokens.shape, dtype=np.float32)
        self._repeat_bonuses = np.zeros(self.tokens.shape, dtype=np.float32)

    def draw(self, logits: torch.Tensor, position: int) -> None:
        """The most probable token of each row [n, V]."""
        tokens, confidence, lead = ops.leaders(logits)
        self.tokens[:, position] = ops.to_host(tokens)
        self.confidence[:, position] = confidence.cpu().numpy()
        if logits.device.type != "cpu":  # there the proposer does without repeat_bonuses
            self.signal[:, position] = ahead_on_device(lead, confidence).cpu().numpy()
            return
        gather_signal(
            lead.numpy(),
            confidence.numpy(),
            LOGIT_RANGE,
            self._text,
            np.zeros_like(self._rows),
            self._lengths,
            self.tokens,
            self._rows,
            position,
            REPEAT_MATCH,
            REPEAT_WEIGHT,
            self.signal,
            self._repeat_bonuses,
        )
