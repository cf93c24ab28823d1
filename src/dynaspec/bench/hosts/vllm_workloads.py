"""What vLLM's sides decode: a constant load each, and a workload that changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice

from ..datasets import BenchPrompt
from .vllm_side import Wave

SHIFT = "shift"
"""Name of the workload that changes."""
_HARD_AT_ONCE, _HARD_TEMPERATURE = 4, 1.3
_ALONE = 4
"""Prompts of a load of one, one after the other."""


def workloads(
    prompts: Sequence[tuple[BenchPrompt, list[int]]], loads: Sequence[int], max_tokens: int
) -> dict[str, list[Wave]]:
    """Name → waves, one after the other. A load's name is its number.

    The workload that changes is text that repeats itself, alone; the same prompts at a temperature at which the drafter
    is mostly wrong; the largest load at once; and one long answer alone.

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

    def wave(chosen: Sequence[list[int]], count: int, *, temperature: float = 0.0, length: int = max_tokens) -> Wave:
        return {"prompts": list(islice(cycle(chosen), count)), "max_tokens": length, "temperature": temperature}

    found = {
        str(load): [wave(everything[i * load :] or everything, load) for i in range(max(1, _ALONE // load))]
        for load in loads
    }
    return found | {
        SHIFT: [
            wave(easy, 1),
            wave(easy[1:] or easy, 1),
            wave(everything, _HARD_AT_ONCE, temperature=_HARD_TEMPERATURE),
            wave(everything, max(loads)),
            wave(everything, 1, length=2 * max_tokens),
        ]
    }
