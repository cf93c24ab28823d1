"""How tests of heads in whole engines are set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynaspec import SamplingParams
from dynaspec.contract.step import Limits
from unit.engine.fakes import ScriptedController

from .workloads import MODES, PROMPTS


def speculation(head: str, **options: Any) -> dict[str, Any]:
    """The head by itself; its config.json says of which method it is, if no option does."""
    return {"model": head, "policy": "constant", "prompt_lookup_max": 0, **options}


def scripted(*lengths: int, keep: int | None = None) -> Callable[[Limits], ScriptedController]:
    """A controller that drafts these lengths, one a step, over and over."""
    return lambda limits: ScriptedController(lengths, keep=keep)


def params_of(mode: str) -> list[SamplingParams]:
    return [MODES[mode](i) for i in range(len(PROMPTS))]


def greedy(most: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, **options)
