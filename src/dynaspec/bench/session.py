"""A comparison from checkpoints to results: opens one engine a policy, runs them, frees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from dynaspec.contract.errors import ConfigError, DynaspecError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import PLAIN, PolicySpec

from .datasets import BenchPrompt, fit
from .decoders import Host, OpenDecoder
from .measure import Run
from .offline import (
    PolicyResult,
    Progress,
    Workload,
    all_rounds,
    as_json,
    compare,
    results_of,
    speedups_by_category,
)
from .provenance import provenance
from .report import SCHEMA


@dataclass(frozen=True, slots=True)
class Session:
    """What was compared, and what came out."""

    workload: Workload
    results: tuple[PolicyResult, ...]
    cut: int
    """Prompts that were too long and lost their beginning."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Policy that the engine could not be opened with → why not."""

    @property
    def speedups(self) -> dict[str, dict[str, float]]:
        """See ``speedups_by_category``."""
        return speedups_by_category(self.results, self.workload)

    def document(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Everything measured, with its provenance, as JSON values."""
        speedups = self.speedups
        return {
            "schema": SCHEMA,
            "provenance": provenance(),
            "options": dict(options),
            "prompts_cut": self.cut,
            "results": [
                as_json(result, self.workload) | {"speedup_by_category": speedups[result.name]}
                for result in self.results
            ],
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
    leave_out: bool = False,
) -> Session:
    """Compares policies on prompts, which with ``chat`` are users' turns; those too long for the model are cut from the
    left.

    Args:
        leave_out: policies that cannot be opened on this target are left out and named, but for plain decoding.

    Raises:
        ConfigError: all policies but plain decoding are left out.
        ConfigError, CheckpointError, CapacityError, RequestError: see ``LLM``.
    """

    def workload(decoder: OpenDecoder) -> tuple[Workload, int]:
        fitted = fit(prompts, decoder.tokenizer, decoder.max_model_len - (params.max_tokens or 0), chat=chat)
        return Workload(fitted.token_ids, tuple(p.category for p in prompts), params, rounds), fitted.cut

    with ExitStack() as stack:
        opened: dict[str, OpenDecoder] = {}
        runs: dict[str, list[Run]] = {}
        left_out: dict[str, str] = {}
        for spec in specs:
            progress(f"{spec.name}: loading")
            try:
                decoder = host.open(spec)
            except DynaspecError as error:
                if not leave_out or spec.name == PLAIN:
                    raise
                left_out[spec.name] = str(error)
                continue
            with ExitStack() as alone:
                (stack if host.alternating else alone).callback(decoder.close)
                work, cut = workload(decoder)
                if host.alternating:
                    opened[spec.name] = decoder
                else:
                    runs[spec.name] = all_rounds(spec.name, decoder, work, progress)
        if left_out and len(left_out) == len(specs) - 1:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise ConfigError(f"nothing is left to compare with plain decoding ({reasons})")
        results = compare(opened, work, progress) if host.alternating else results_of(runs)
        return Session(work, tuple(results), cut, left_out)
