"""A comparison from checkpoints to results: loads one engine a policy, runs them, frees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dynaspec.api import LLM
from dynaspec.contract.sampling_params import SamplingParams

from .datasets import BenchPrompt, fit
from .offline import PolicyResult, Progress, Workload, as_json, compare
from .policies import PolicySpec
from .provenance import provenance
from .report import SCHEMA


@dataclass(frozen=True, slots=True)
class Session:
    """What was compared, and what came out."""

    workload: Workload
    results: tuple[PolicyResult, ...]
    cut: int
    """Prompts that were too long and lost their beginning."""

    def document(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Everything measured, with its provenance, as JSON values."""
        return {
            "schema": SCHEMA,
            "provenance": provenance(),
            "options": dict(options),
            "prompts_cut": self.cut,
            "results": [as_json(result, self.workload) for result in self.results],
        }


def run_comparison(
    model: str,
    specs: Sequence[PolicySpec],
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    engine: Mapping[str, Any],
    rounds: int,
    progress: Progress,
) -> Session:
    """Compares policies on prompts; those too long for the model are cut from the left.

    Args:
        engine: options of ``LLM`` for every policy.

    Raises:
        ConfigError, CheckpointError, CapacityError, RequestError: see ``LLM``.
    """
    with ExitStack() as stack:
        llms: dict[str, LLM] = {}
        for spec in specs:
            progress(f"{spec.name}: loading")
            llms[spec.name] = LLM(model, speculative_config=spec.config, **engine)
            stack.callback(llms[spec.name].close)
        first = next(iter(llms.values()))
        room = first.max_model_len - (params.max_tokens or 0)
        fitted = fit(prompts, first.tokenizer, room)
        workload = Workload(fitted.token_ids, tuple(p.category for p in prompts), params, rounds)
        return Session(workload, tuple(compare(llms, workload, progress)), fitted.cut)
