"""One continuation of one prompt, from arrival to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dynaspec.contract.outputs import FinishReason
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling.grammar import DeadEnd, Grammar


@dataclass(slots=True)
class DraftCounts:
    """What became of one request's drafts: totals over the decoding steps of one request, preemptions and all.

    Args:
        detailed: also count by position and keep every step.
    """

    detailed: bool = False
    drafts: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    """Tokens of steps with a draft, the target's own included."""
    drafted_per_pos: list[int] = field(default_factory=list)
    accepted_per_pos: list[int] = field(default_factory=list)
    per_step: list[tuple[int, int]] = field(default_factory=list)

    def add(self, *, drafted: int, verified: int, accepted: int, emitted: int) -> None:
        """One decoding step; ``drafted`` may be 0. Accepted tokens behind the request's end do not count."""
        if self.detailed:
            self.per_step.append((drafted, accepted))
        if drafted == 0:
            return
        self.drafts += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.emitted += emitted
        if self.detailed:
            missing = drafted - len(self.drafted_per_pos)
            self.drafted_per_pos.extend([0] * missing)
            self.accepted_per_pos.extend([0] * missing)
            for position in range(drafted):
                self.drafted_per_pos[position] += 1
                self.accepted_per_pos[position] += position < accepted


class TextSink(Protocol):
    """Turns committed tokens into text, one by one."""

    text: str
    """So far; a later stop string may cut what lies behind ``stable_length``."""

    def stable_length(self) -> int:
        """Characters that no later stop string can take back."""
        ...

    def push(self, token: int, *, may_stop: bool) -> str | None:
        """Adds a token; returns the stop string that it has completed, if it ``may_stop`` the text."""
        ...

    def finish(self) -> None:
        """No more tokens will come."""
        ...


@dataclass(slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position."""

    chosen: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Request:
    """State that outlives preemption; what belongs to a running lane is in ``Lanes``."""

    id: str
    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    max_length: int
    """Most tokens, prompt included: the sooner of max_tokens and the model's length."""
    seed: int
    n_index: int = 0
    stop_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop tokens that end it."""
    eos_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    """``params.structured_outputs``, compiled."""
    cache_salt: str = ""
    """Requests with different ones share neither KV nor texts to draft from."""
    text: TextSink | None = None
    arrival_s: float = 0.0
    """Monotonic seconds, like all times here."""

    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    lane: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    scheduled_s: float = 0.0
    """When it took a lane first."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    draft_counts: DraftCounts | None = field(init=False)
    """None where the caller does not want any."""

    def __post_init__(self) -> None:
        level = self.params.speculation_metrics
        self.draft_counts = None if level == "off" else DraftCounts(detailed=level == "detailed")

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def tokens(self) -> npt.NDArray[np.int32]:
        """[length] prompt and output."""
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])

    def commit(self, tokens: Sequence[int], now: float, dead_end: DeadEnd | None = None) -> int:
        """Takes tokens one by one until one ends the request; returns how many it took.

        The order of the checks is: stop token (once min_tokens are there), stop string, length. A grammar lets no stop
        token come before min_tokens unless nothing else may; then it ends the request.

        Args:
            dead_end: no token may follow these, so that the last of them ends it.
        """
        if not self.output:
            self.first_token_s = now
        self.last_token_s = now
        for taken, token in enumerate(tokens, start=1):
            self.output.append(token)
            if self._ends_with(token):
                return taken
        if dead_end is not None:
            self.finish_reason, self.stop_reason = dead_end.finish_reason, dead_end.why
        return len(tokens)

    def end(self, reason: FinishReason, now: float) -> None:
        self.finish_reason = reason
        self.finished_s = now
        if self.text is not None:
            self.text.finish()

    def _ends_with(self, token: int) -> bool:
        allowed_to_stop = len(self.output) >= self.params.min_tokens
        if token in self.stop_ids and (allowed_to_stop or self.grammar is not None):
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.eos_ids else token
            return True
        matched = self.text.push(token, may_stop=allowed_to_stop) if self.text is not None else None
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
            return True
        if self.length >= self.max_length:
            self.finish_reason = "length"
            return True
        return False
