"""What sampling keeps of every running request, one table row (*lane*) each: parameters and the tokens seen.

Masks, biases and penalties are edits of single entries of a score matrix, on any device: elementwise float32 arithmetic
only, so that an entry's bits do not depend on what else is edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.errors import IntegrityError
from dynaspec.contract.sampling_params import SamplingParams

from . import ops
from .grammar import Grammar
from .grammar_state import GrammarState, LaneGrammars
from .ops import Rows
from .rng import Int64, Purpose, UInt64, request_key, row_keys
from .rules import LOWEST_TEMPERATURE, Needs, Rules

Float32 = npt.NDArray[np.float32]


class TokenCounts:
    """Distinct tokens of one request, in the order of their first appearance.

    Sparse, because a request sees far fewer distinct tokens than a vocabulary holds.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._slot: dict[int, int] = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.fromiter(self._slot, np.int64, len(self._slot))
        self._counts = np.zeros(len(self._slot), np.float32)

    def add(self, tokens: Sequence[int]) -> None:
        """Counts output tokens that became final."""
        self._tokens, self._counts = self.after(tokens)
        for token in tokens:
            self._slot.setdefault(token, len(self._slot))

    def after(self, drafted: Sequence[int]) -> tuple[Int64, npt.NDArray[np.float32]]:
        """(distinct tokens [N], occurrences of each in the output [N]) once ``drafted`` follow the output."""
        if not drafted:
            return self._tokens, self._counts
        new = [token for token in dict.fromkeys(drafted) if token not in self._slot]
        tokens = np.concatenate((self._tokens, np.array(new, np.int64))) if new else self._tokens
        counts = np.concatenate((self._counts, np.zeros(len(new), np.float32)))
        for token in drafted:
            slot = self._slot.get(token)
            counts[len(self._slot) + new.index(token) if slot is None else slot] += 1
        return tokens, counts


@dataclass(slots=True)
class Entries:
    """Some tokens of some rows of a score matrix."""

    flat: torch.Tensor
    """[N] int64 row · V + token"""
    sizes: Int64
    """How many of the N entries belong to each of the rows, in order."""

    @classmethod
    def of(cls, rows: Int64, tokens: Sequence[Int64], vocab_size: int, device: torch.device) -> Entries:
        """``tokens[i]`` of row ``rows[i]``."""
        sizes = np.fromiter((column.size for column in tokens), np.int64, len(tokens))
        flat = np.concatenate(tokens) + np.repeat(rows * vocab_size, sizes)
        return cls(torch.from_numpy(flat).to(device), sizes)


def forbid(scores: torch.Tensor, entries: Entries) -> None:
    """Sets the entries to −inf."""
    scores.view(-1).index_fill_(0, entries.flat, -torch.inf)


def allow_only(scores: torch.Tensor, rows: Int64, entries: Entries) -> None:
    """Sets all but the entries of ``rows``, which must be distinct, to −inf."""
    kept = _read(scores, entries)
    scores[torch.from_numpy(rows).to(scores.device)] = -torch.inf
    _write(scores, entries, kept)


def add(scores: torch.Tensor, entries: Entries, values: Sequence[Float32]) -> None:
    """Adds ``values`` to the entries, which must be distinct."""
    _write(scores, entries, _read(scores, entries) + torch.from_numpy(np.concatenate(values)).to(scores.device))


def penalise(
    scores: torch.Tensor,
    entries: Entries,
    counts: Sequence[Float32],
    repetition: Float32,
    frequency: Float32,
    presence: Float32,
) -> None:
    """Penalises tokens already seen.

    Args:
        scores: [R, V], changed in place
        entries: the distinct tokens of each row's prompt and output
        counts: for each row, how often the output holds each of them
        repetition: [rows] divides positive and multiplies negative scores of all entries
        frequency: [rows] subtracted once for each occurrence in the output
        presence: [rows] subtracted if the output holds the token
    """

    def spread(column: Float32) -> torch.Tensor:
        return torch.from_numpy(np.repeat(column, entries.sizes)).to(scores.device)

    count = torch.from_numpy(np.concatenate(counts)).to(scores.device)
    factor = spread(repetition)
    values = _read(scores, entries)
    values = torch.where(values > 0, values / factor, values * factor)
    values -= spread(frequency) * count
    values -= spread(presence) * (count > 0)
    _write(scores, entries, values)


def _read(scores: torch.Tensor, entries: Entries) -> torch.Tensor:
    return scores.view(-1).index_select(0, entries.flat)


def _write(scores: torch.Tensor, entries: Entries, values: torch.Tensor) -> None:
    scores.view(-1).index_copy_(0, entries.flat, values)


class SamplerState:
    """Parameters and token statistics of the running requests, in columns [max_lanes] on the host.

    Args:
        max_lanes: most requests that run at the same time
        vocab_size: width V of the logits
        device: where the logits are
    """

    def __init__(self, max_lanes: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.output_len = np.zeros(max_lanes, np.int64)
        self.greedy = np.ones(max_lanes, np.bool_)
        self.seeded = np.zeros(max_lanes, np.bool_)
        """The caller gave a seed: coupled sampling, else rejection sampling."""
        self._keys = np.zeros(max_lanes, np.uint64)
        self._needs = np.zeros(max_lanes, np.int64)
        self._min_tokens = np.zeros(max_lanes, np.int64)
        self._temperature = np.ones(max_lanes, np.float32)
        self._min_p = np.zeros(max_lanes, np.float64)
        self._top_k = np.zeros(max_lanes, np.int64)
        self._top_p = np.ones(max_lanes, np.float64)
        self._repetition = np.ones(max_lanes, np.float32)
        self._frequency = np.zeros(max_lanes, np.float32)
        self._presence = np.zeros(max_lanes, np.float32)
        self._rules: dict[int, Rules] = {}
        self._counts: dict[int, TokenCounts] = {}
        self._recent: dict[int, list[int]] = {}
        self.grammars = LaneGrammars()

    def add(
        self,
        lane: int,
        params: SamplingParams,
        *,
        seed: int,
        n_index: int,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        prompt: Sequence[int],
        output: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """A request takes a lane; after a preemption with the output it already has.

        Args:
            seed: ``params.seed``, or a random number if that is None
            n_index: which of the request's ``n`` continuations this is
            eos_token_ids: the model's end-of-sequence tokens
            bad_words: ``params.bad_words`` as token sequences
            output: tokens that are final already
            grammar: ``params.structured_outputs``, compiled

        Raises:
            RequestError: a token id outside the vocabulary, or rules that together allow no token.
        """
        rules = Rules.of(params, vocab_size=self.vocab_size, eos_token_ids=eos_token_ids, bad_words=bad_words)
        self._rules[lane] = rules
        self._needs[lane] = rules.needs
        self._keys[lane] = request_key(seed, n_index)
        self.output_len[lane] = 0
        self.greedy[lane] = params.greedy
        self.seeded[lane] = params.seed is not None
        self._min_tokens[lane] = params.min_tokens
        self._temperature[lane] = max(params.temperature, LOWEST_TEMPERATURE)
        self._min_p[lane] = params.min_p
        self._top_k[lane] = max(params.top_k, 0)
        self._top_p[lane] = params.top_p
        self._repetition[lane] = params.repetition_penalty
        self._frequency[lane] = params.frequency_penalty
        self._presence[lane] = params.presence_penalty
        if rules.needs & Needs.PENALTIES:
            self._counts[lane] = TokenCounts(prompt if params.repetition_penalty != 1.0 else ())
        if rules.needs & Needs.BAD_WORDS:
            self._recent[lane] = []
        if grammar is not None:
            self.grammars.add(lane, GrammarState(grammar, rules.stops.tolist(), params.min_tokens))
            self._needs[lane] = (rules.needs | Needs.GRAMMAR) & ~Needs.MIN_TOKENS  # which the grammar sees to
        self.commit(lane, output)

    def commit(self, lane: int, tokens: Sequence[int]) -> None:
        """These output tokens became final."""
        self.output_len[lane] += len(tokens)
        if self.output_len[lane] >= self._min_tokens[lane]:
            self._needs[lane] &= ~Needs.MIN_TOKENS
        if lane in self._counts:
            self._counts[lane].add(tokens)
        if lane in self._recent:
            context = self._rules[lane].context
            self._recent[lane] = [*self._recent[lane], *tokens][-context:] if context else []
        self.grammars.commit(lane, tokens)

    def remove(self, lane: int) -> None:
        """The lane's request has ended or was preempted."""
        self._needs[lane] = 0
        self.greedy[lane] = True
        self.seeded[lane] = False
        self._rules.pop(lane, None)
        self._counts.pop(lane, None)
        self._recent.pop(lane, None)
        self.grammars.remove(lane)

    def exact(self, lanes: Int64) -> npt.NDArray[np.bool_]:
        """Whether the requests' tokens depend on the target's rows alone: greedy ones and seeded ones."""
        return self.greedy[lanes] | self.seeded[lanes]

    def keys(self, rows: Rows, index: Int64, purpose: Purpose) -> UInt64:
        """Stream keys of the rows ``index`` [r]; seeded requests draft from the TARGET stream (coupled sampling)."""
        lanes, depth = rows.lanes[index], rows.depth[index]
        coupled = self.seeded[lanes] & (purpose is Purpose.DRAFT)
        purposes = np.where(coupled, Purpose.TARGET, purpose)
        return row_keys(self._keys[lanes], self.output_len[lanes], depth, purposes)

    def reads_drafts(self, lanes: Int64) -> bool:
        """Whether ``process`` looks at the drafted tokens of any of these lanes."""
        return bool((self._needs[lanes] & (Needs.PENALTIES | Needs.BAD_WORDS | Needs.GRAMMAR)).any())

    def leaves_alone(self, lanes: Int64) -> bool:
        """Whether ``process`` returns the logits themselves for rows of these lanes."""
        return not self._needs[lanes].any()

    def process(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Scores whose softmax is each row's distribution: −inf outside its support, temperature applied.

        Rows of greedy requests pass the processors that can change the argmax, and no temperature. Each row's
        processors see the output and the drafted tokens x_1 … x_depth before it.

        Args:
            logits: [R, V] float32; never changed

        Returns:
            [R, V] float32; ``logits`` itself where there is nothing to do.

        Raises:
            IntegrityError: logits narrower than the vocabulary that the rules were checked against.
        """
        needs = self._needs[rows.lanes]
        combined = int(np.bitwise_or.reduce(needs, initial=0))
        if not combined:
            return logits
        if logits.shape[1] < self.vocab_size:
            raise IntegrityError(f"logits are {logits.shape[1]} wide; expected at least {self.vocab_size}")
        scores = logits.clone(memory_format=torch.contiguous_format)
        for need, apply in (
            (Needs.ALLOWED, self._apply_allowed),
            (Needs.GRAMMAR, self._apply_grammar),
            (Needs.BAD_WORDS, self._apply_bad_words),
            (Needs.MIN_TOKENS, self._apply_min_tokens),
            (Needs.BIAS, self._apply_bias),
            (Needs.PENALTIES, self._apply_penalties),
            (Needs.TRUNCATION, self._truncate),
        ):
            if combined & need:
                apply(scores, rows, np.flatnonzero(needs & need))
        return scores

    def without_token(self, scores: torch.Tensor, rows: Rows) -> npt.NDArray[np.bool_]:
        """[R] rows of processed scores that leave no token at all."""
        nothing = np.zeros(rows.lanes.size, np.bool_)
        index = np.flatnonzero(self._needs[rows.lanes] & Needs.RESTRICTED)
        if index.size:
            nothing[index] = ops.empty(scores, index)
        return nothing

    def _apply_allowed(self, scores: torch.Tensor, rows: Rows, index: Int64) -> None:
        allowed = [self._rules[lane].allowed for lane in rows.lanes[index].tolist()]
        allow_only(scores, index, self._entries(scores, index, allowed))

    def _apply_grammar(self, scores: torch.Tensor, rows: Rows, index: Int64) -> None:
        ops.keep_set(scores, index, self.grammars.bits(rows, index))

    def _apply_bad_words(self, scores: torch.Tensor, rows: Rows, index: Int64) -> None:
        banned = []
        for row, lane in zip(index, rows.lanes[index].tolist(), strict=True):
            banned.append(self._rules[lane].completed_by([*self._recent[lane], *rows.drafted(row)]))
        forbid(scores, self._entries(scores, index, banned))

    def _apply_min_tokens(self, scores: torch.Tensor, rows: Rows, index: Int64) -> None:
        lanes = rows.lanes[index]
        index = index[self.output_len[lanes] + rows.depth[index] < self._min_tokens[lanes]]
        if index.size:
            stops = [self._rules[lane].stops for lane in rows.lanes[index].tolist()]
            forbid(scores, self._entries(scores, index, stops))

    def _apply_bias(self, scores: torch.Tensor, rows: Rows, index: Int64) -> None:
        rules = [self._rules[lane] for lane in rows.lanes[index].tolist()]
        add(scores, self._entries(scores, index, [r.biased for r in rules]), [r.bias for r in rules])

    def _apply_penalties(self, scores: torch.Tensor, rows: Rows, index: Int64) -> None:
        lanes = rows.lanes[index]
        tokens, counts = [], []
        for row, lane in zip(index, lanes.tolist(), strict=True):
            row_tokens, row_counts = self._counts[lane].after(rows.drafted(row))
            tokens.append(row_tokens)
            counts.append(row_counts)
        penalise(
            scores,
            self._entries(scores, index, tokens),
            counts,
            self._repetition[lanes],
            self._frequency[lanes],
            self._presence[lanes],
        )

    def _truncate(self, scores: torch.Tensor, rows: Rows, index: Int64) -> None:
        lanes = rows.lanes[index]
        ops.truncate(
            scores,
            index,
            self._temperature[lanes],
            self._min_p[lanes],
            self._top_k[lanes],
            self._top_p[lanes],
        )

    def _entries(self, scores: torch.Tensor, index: Int64, tokens: Sequence[Int64]) -> Entries:
        return Entries.of(index, tokens, scores.shape[1], scores.device)
