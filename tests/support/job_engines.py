"""Engines that decode jobs, and a clock for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynaspec.bench.decoders import Job, open_engine
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import parse_policy
from dynaspec.engine.engine import Engine

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


@contextmanager
def opened(tiny: Any) -> Iterator[Engine]:
    """An engine on the tiny pair that drafts two tokens; its books are in order at the end."""
    made = open_engine(tiny.target, parse_policy("constant:2", tiny.drafter), max_num_seqs=4)
    yield made
    made.verify_integrity()
    made.close()


class Clock:
    """Goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        self.now += 1.0
        return self.now


def jobs(count: int) -> list[Job]:
    """Different prompts."""
    return [Job((5 + i, 6, 7), PARAMS) for i in range(count)]
