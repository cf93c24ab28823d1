"""A pretended vLLM around a drafter of others' making: plain Python, in vLLM's order of events.

Prompts are read in chunks, requests come, go, are preempted and change their rows, and drafts are verified greedily.
As in vLLM, the drafter is called before anybody knows who has ended, and is told rows of tokens and no names.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

Next = Callable[[Sequence[int]], int]
"""The greedy continuation of a text."""
PASS_S = 0.01


class Clock:
    """Seconds that pass in passes of the target, and a little whenever somebody looks."""

    now = 0.0
    slow = 1.0
    """How many times as long a pass of the target takes."""

    def __call__(self) -> float:
        self.now += 1e-5
        return self.now


class Drafter(Protocol):
    def propose(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: np.ndarray,
        tokens: np.ndarray,
        pass_rows: int | None,
        /,
    ) -> list[list[int]]: ...


@dataclass(eq=False)
class Request:
    prompt: list[int]
    most: int = 30
    """Tokens to emit."""
    text: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens with KV of the target's."""
    drafts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = list(self.prompt)


@dataclass(frozen=True)
class Verified:
    """What a step has done with one request's drafts."""

    handed: int
    """Drafts that it had."""
    cut: bool
    """Not all of them were verified."""
    accepted: int
    emitted: int


@dataclass
class Seen:
    """A step, as it was before the next one."""

    rows: list[Request]
    sampled: list[list[int]]
    """Tokens that it has brought; none: a prompt is still read."""
    verified: dict[Request, Verified]
    pass_rows: int
    verify_rows: int
    drafts: list[list[int]] = field(default_factory=list)

    @property
    def decoding(self) -> list[Request]:
        """Those that the step has brought tokens, in the batch's order."""
        return [request for request, tokens in zip(self.rows, self.sampled, strict=True) if tokens]


class Vllm:
    def __init__(
        self, target: Next, drafter: Drafter, clock: Clock, *, max_num_seqs: int, max_model_len: int, seed: int = 0
    ) -> None:
        self.rows: list[Request] = []
        self.waiting: list[Request] = []
        self.outputs: dict[Request, list[int]] = {}
        """Of those that have ended."""
        self._target = target
        self._drafter = drafter
        self._clock = clock
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._random = random.Random(seed)
        self._garbage = np.random.default_rng(seed)

    @property
    def busy(self) -> bool:
        return bool(self.rows or self.waiting)

    def step(
        self, *, budget: int = 24, preempt: bool = False, move: bool = False, cut: bool = False, unseen: bool = False
    ) -> Seen:
        """
        Args:
            budget: prompt tokens that it may read.
            preempt: one of the requests has to begin again.
            move: two rows change places.
            cut: the scheduler verifies a part of each draft only.
            unseen: the drafter is not called.
        """
        self._leave()
        while self.waiting and len(self.rows) < self._max_num_seqs:
            self.rows.append(self.waiting.pop(0))
        if preempt and self.rows:
            self._preempt(self._random.randrange(len(self.rows)))
        if move and len(self.rows) > 1:
            i, j = self._random.sample(range(len(self.rows)), 2)
            self.rows[i], self.rows[j] = self.rows[j], self.rows[i]
        seen = Seen(list(self.rows), [], {}, 0, 0)
        for request in self.rows:
            decoding = request.computed == len(request.text) - 1
            if decoding and cut:
                keep = self._random.randint(0, len(request.drafts))
            else:
                keep = len(request.drafts)
            if decoding:
                rows, brought = 1 + keep, self._verify(request, keep, seen)
                seen.verify_rows += rows
            else:
                rows = min(budget, len(request.text) - request.computed)
                budget -= rows
                whole = request.computed + rows == len(request.text)
                brought = [self._target(request.text)] if whole else []
            request.drafts = []
            request.computed = request.computed + rows if not brought else len(request.text) + len(brought) - 1
            request.text += brought
            seen.pass_rows += rows
            seen.sampled.append(brought)
        self._clock.now += PASS_S * self._clock.slow
        if not unseen:
            self._draft(seen)
        return seen

    def _verify(self, request: Request, keep: int, seen: Seen) -> list[int]:
        emitted: list[int] = []
        for draft in request.drafts[:keep]:
            emitted.append(self._target([*request.text, *emitted]))
            if emitted[-1] != draft:
                break
        else:
            emitted.append(self._target([*request.text, *emitted]))
        handed = len(request.drafts)
        seen.verified[request] = Verified(handed, keep < handed, len(emitted) - 1, len(emitted))
        return emitted

    def _draft(self, seen: Seen) -> None:
        tokens = self._garbage.integers(0, 30, (self._max_num_seqs, self._max_model_len), dtype=np.int32)
        lengths = self._garbage.integers(0, self._max_model_len, self._max_num_seqs, dtype=np.int32)
        for row, request in enumerate(self.rows):
            tokens[row, : len(request.text)] = request.text
            lengths[row] = len(request.text)
        seen.drafts = self._drafter.propose(seen.sampled, lengths, tokens, seen.pass_rows)
        for request, drafts in zip(self.rows, seen.drafts, strict=True):
            request.drafts = list(drafts)

    def _leave(self) -> None:
        """Those that have ended; the last row takes the place of each."""
        for row in reversed(range(len(self.rows))):
            request = self.rows[row]
            end = min(len(request.prompt) + request.most, self._max_model_len)
            if len(request.text) >= end:
                self.outputs[request] = request.text[len(request.prompt) : end]
                self._take_out(row)

    def _preempt(self, row: int) -> None:
        request = self.rows[row]
        request.computed, request.drafts = 0, []
        self._take_out(row)
        self.waiting.insert(0, request)

    def _take_out(self, row: int) -> None:
        self.rows[row] = self.rows[-1]
        self.rows.pop()


def mostly(following: Next, vocab: int, *, otherwise_one_in: int = 4) -> Next:
    """A target that says what the drafter says, but after some texts something else."""

    def target(text: Sequence[int]) -> int:
        token = following(text)
        deviates = zlib.crc32(np.array(text, dtype=np.int32).tobytes()) % otherwise_one_in == 0
        return (token + 1) % vocab if deviates else token

    return target


def prompts(count: int, vocab: int, *, seed: int = 1, longest: int = 40) -> list[list[int]]:
    """Texts that differ, long ones and short ones."""
    rng = random.Random(seed)
    return [[i % vocab, *(rng.randrange(vocab) for _ in range(rng.randint(2, longest)))] for i in range(count)]
