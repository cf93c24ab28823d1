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
from dynaspec.kv.arena import Arena
from dynaspec.kv.rows import ragged_rows
from dynaspec.model.base import Model
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
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
    branches = _Branches(drafter, text, len(prompt), longest)
    tokens, confidence = branches.first()
    runs = run_lengths(tokens == text[len(prompt) :])
    columns = [confidence]
    for done in range(1, longest):
        tokens, confidence = branches.extend(tokens, done)
        columns.append(confidence)
    return Rollouts(runs, np.stack(columns, axis=1))


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

    def __init__(self, model: Model, text: Ints, prompt_tokens: int, longest: int) -> None:
        self._model = model
        self._text = text
        self._lengths = np.arange(prompt_tokens, len(text), dtype=np.int64)
        """[n] tokens before each draft."""
        shared = -(-len(text) // BLOCK_SIZE)
        own = (BLOCK_SIZE - 1 + longest) // BLOCK_SIZE + 1
        count = len(self._lengths)
        self._tables = np.zeros((count + 1, shared + own), dtype=np.int32)
        self._tables[:, :shared] = np.arange(shared)
        for i, length in enumerate(self._lengths.tolist()):
            first = length // BLOCK_SIZE
            self._tables[i + 1, first : first + own] = shared + i * own + np.arange(own)
        blocks = shared + count * own
        self._arena = Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), model.dtype, model.device)

    def first(self) -> tuple[Ints, Floats]:
        """[n] first tokens of the drafts, and the confidence in each."""
        zero = np.zeros(1, dtype=np.int64)
        hidden = self._forward(self._text[:-1], zero, zero, np.array([len(self._text) - 1]))
        return self._draw(hidden[int(self._lengths[0]) - 1 :])

    def extend(self, tokens: Ints, done: int) -> tuple[Ints, Floats]:
        """[n] the tokens after ``tokens``, which are those number ``done`` (1-based) of the drafts."""
        lanes = np.arange(1, len(self._lengths) + 1)
        if done > 1:
            start, count, rows = self._lengths + done - 1, np.ones_like(lanes), tokens
        else:  # the own blocks begin with what the text has in its last, unfinished block
            start = self._lengths // BLOCK_SIZE * BLOCK_SIZE
            count = self._lengths - start + 1
            tails = zip(start.tolist(), self._lengths.tolist(), tokens.tolist(), strict=True)
            rows = np.concatenate([np.append(self._text[low:high], token) for low, high, token in tails])
        hidden = self._forward(rows, lanes, start, count)
        return self._draw(hidden[torch.from_numpy(np.cumsum(count) - 1).to(hidden.device)])

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
        return self._model.forward(batch, self._arena.layers).hidden

    def _draw(self, hidden: torch.Tensor) -> tuple[Ints, Floats]:
        logits = self._model.logits(hidden)
        tokens = ops.argmax(logits)
        confidence = ops.probability(logits, tokens)
        return ops.to_host(tokens).copy(), confidence.cpu().numpy().astype(np.float64)
