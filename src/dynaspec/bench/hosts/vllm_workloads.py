"""What vLLM's sides decode: a constant load each, and a workload that changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice

from ..datasets import BenchPrompt
from .vllm_side import Load

SHIFT = "shift"
"""Name of the workload that changes."""
_HARD_AT_ONCE, _HARD_TEMPERATURE = 4, 1.3
_TURNS = 3
"""Requests of a load for each that runs at a time, so that its end, when fewer and fewer run, is a small part."""


def of_round(load: Load, number: int) -> Load:
    """The load of a round: its prompts begin so many tokens later, so that no round repeats the one before.

    vLLM's kernels for CPUs are made for each number of rows when it first occurs. Given the very same requests again, a
    scheduler that decides the same again runs numbers of rows that have all been there, as no server does.
    """
    return {**load, "prompts": [tokens[min(number, len(tokens) - 1) :] for tokens in load["prompts"]]}


def workloads(
    prompts: Sequence[tuple[BenchPrompt, list[int]]], loads: Sequence[int], max_tokens: int
) -> dict[str, list[Load]]:
    """Name → loads, one after the other. A constant load's name is its number.

    The workload that changes is text that repeats itself, alone; mixed prompts at a temperature at which the drafter is
    mostly wrong; the largest load; and one long answer alone.

    Args:
        prompts: with their token ids.
        loads: requests at once.
        max_tokens: of each request.
    """
    kinds: dict[str, list[list[int]]] = {}
    for prompt, tokens in prompts:
        kinds.setdefault(prompt.category, []).append(tokens)
    everything = list(chain.from_iterable(zip(*kinds.values(), strict=False)))
    easy = kinds.get("editing", everything)

    def load(
        chosen: Sequence[list[int]], concurrency: int, count: int, *, temperature: float = 0.0, length: int = max_tokens
    ) -> Load:
        requests = list(islice(cycle(chosen), count))
        return {"concurrency": concurrency, "prompts": requests, "max_tokens": length, "temperature": temperature}

    found = {str(running): [load(everything, running, _TURNS * running)] for running in loads}
    most = max(loads)
    return found | {
        SHIFT: [
            load(easy, 1, 3),
            load(everything, _HARD_AT_ONCE, 2 * _HARD_AT_ONCE, temperature=_HARD_TEMPERATURE),
            load(everything, most, 2 * most),
            load(everything, 1, 1, length=3 * max_tokens),
        ]
    }
