"""A comparison from checkpoints to results: opens one engine a policy, runs them, frees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dynaspec.contract.sampling_params import SamplingParams

from .datasets import BenchPrompt, fit
from .decoders import Host, OpenDecoder
from .measure import Run
from .offline import PolicyResult, Progress, Workload, all_rounds, as_json, compare, results_of
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
    host: Host,
    specs: Sequence[PolicySpec],
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    rounds: int,
    progress: Progress,
    *,
    chat: bool = False,
) -> Session:
    """Compares policies on prompts, which with ``chat`` are users' turns; those too long for the model are cut from the
    left.

    Raises:
        ConfigError, CheckpointError, CapacityError, RequestError: see ``LLM``.
    """

    def workload(decoder: OpenDecoder) -> tuple[Workload, int]:
        fitted = fit(prompts, decoder.tokenizer, decoder.max_model_len - (params.max_tokens or 0), chat=chat)
        return Workload(fitted.token_ids, tuple(p.category for p in prompts), params, rounds), fitted.cut

    with ExitStack() as stack:
        opened: dict[str, OpenDecoder] = {}
        runs: dict[str, list[Run]] = {}
        for spec in specs:
            progress(f"{spec.name}: loading")
            decoder = host.open(spec)
            with ExitStack() as alone:
                (stack if host.alternating else alone).callback(decoder.close)
                work, cut = workload(decoder)
                if host.alternating:
                    opened[spec.name] = decoder
                else:
                    runs[spec.name] = all_rounds(spec.name, decoder, work, progress)
        results = compare(opened, work, progress) if host.alternating else results_of(runs)
        return Session(work, tuple(results), cut)
