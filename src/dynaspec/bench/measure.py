"""One timed run of an engine over some prompts, and the arithmetic of several."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.observe.counts import SpecCounts

Tokens = tuple[tuple[int, ...], ...]
"""Output token ids of every prompt."""


class Decoder(Protocol):
    """What is measured; ``LLM`` is one."""

    def generate(
        self, prompts: list[Mapping[str, object]], sampling_params: SamplingParams, /
    ) -> Sequence[RequestOutput]: ...

    def stats(self) -> SpecCounts: ...


@dataclass(frozen=True, slots=True)
class Run:
    """What one pass over the prompts gave and took."""

    seconds: float
    counts: SpecCounts
    outputs: tuple[RequestOutput, ...]

    @property
    def tokens(self) -> Tokens:
        return tuple(tuple(completion.token_ids) for output in self.outputs for completion in output.outputs)

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def run_once(decoder: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Run:
    """Decodes all prompts (token ids) and takes the wall time, prefill included.

    They share a cache salt with each other and with no other run, whose answers would be drafts that are always right.
    """
    salt = uuid4().hex
    given: list[Mapping[str, object]] = [{"prompt_token_ids": list(tokens), "cache_salt": salt} for tokens in prompts]
    before = decoder.stats()
    started = time.perf_counter()
    outputs = tuple(decoder.generate(given, params))
    seconds = time.perf_counter() - started
    return Run(seconds, decoder.stats() - before, outputs)


def different(ours: Tokens, reference: Tokens) -> int:
    """How many outputs are not token for token those of the reference."""
    return sum(a != b for a, b in zip(ours, reference, strict=True))
