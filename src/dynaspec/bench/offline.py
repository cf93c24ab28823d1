"""Policies side by side in one process: same prompts, alternating rounds, medians, and equality with plain decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.outputs import CompletionOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import PLAIN
from dynaspec.observe.counts import SpecCounts

from .measure import Decoder, Run, different, run_once

Progress = Callable[[str], None]
"""Told what is about to run."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What every policy has to do."""

    prompts: tuple[tuple[int, ...], ...]
    categories: tuple[str, ...]
    params: SamplingParams
    rounds: int


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy's rounds."""

    name: str
    runs: tuple[Run, ...]
    speedups: tuple[float, ...]
    """Its tokens/s over plain decoding's in the same round, for every round."""
    different: int
    """Outputs, over all rounds, that were not token for token plain decoding's."""

    @property
    def speedup(self) -> float:
        """Median over the rounds."""
        return median(self.speedups)

    @property
    def identical(self) -> bool:
        return self.different == 0

    @property
    def tokens_per_second(self) -> float:
        return median(run.tokens_per_second for run in self.runs)

    @property
    def counts(self) -> SpecCounts:
        """Of one round: rounds are alike, but for policies that learn."""
        return self.runs[-1].counts


def compare(decoders: Mapping[str, Decoder], workload: Workload, progress: Progress) -> list[PolicyResult]:
    """Runs every policy once a round, in an order that moves on by one each round.

    Args:
        decoders: by policy name; plain decoding must be among them.
        progress: called before every run.

    Raises:
        ConfigError: no plain decoding to compare with, or no round.
    """
    if PLAIN not in decoders or workload.rounds < 1:
        raise ConfigError(f"{list(decoders)} in {workload.rounds} rounds; expected plain among them, and a round")
    for name, decoder in decoders.items():
        warm_up(name, decoder, workload, progress)
    names = list(decoders)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(workload.rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            progress(f"{name}: round {turn + 1} of {workload.rounds}")
            runs[name].append(run_once(decoders[name], workload.prompts, workload.params))
    return results_of(runs)


def warm_up(name: str, decoder: Decoder, workload: Workload, progress: Progress) -> None:
    """Before the first round: what is loaded, compiled or learnt at first is not measured."""
    progress(f"{name}: warm-up")
    run_once(decoder, workload.prompts[:1], workload.params)


def all_rounds(name: str, decoder: Decoder, workload: Workload, progress: Progress) -> list[Run]:
    """A policy's rounds on end, for engines that cannot be open beside each other."""
    warm_up(name, decoder, workload, progress)
    runs = []
    for turn in range(workload.rounds):
        progress(f"{name}: round {turn + 1} of {workload.rounds}")
        runs.append(run_once(decoder, workload.prompts, workload.params))
    return runs


def results_of(runs: Mapping[str, Sequence[Run]]) -> list[PolicyResult]:
    """
    Args:
        runs: by policy name, plain decoding's among them; as many of each.
    """
    return [_result(name, mine, runs[PLAIN]) for name, mine in runs.items()]


def as_json(result: PolicyResult, workload: Workload) -> dict[str, Any]:
    """A result as plain JSON values; counts and times are those of the last round."""
    counts = result.counts
    return {
        "policy": result.name,
        "tokens_per_second": result.tokens_per_second,
        "tokens_per_second_rounds": [run.tokens_per_second for run in result.runs],
        "seconds_rounds": [run.seconds for run in result.runs],
        "output_tokens": result.runs[-1].output_tokens,
        "speedup": result.speedup,
        "speedup_rounds": list(result.speedups),
        "identical": result.identical,
        "different_outputs": result.different,
        "by_category": by_category(result, workload),
        "counts": counts.as_dict(),
    }


def by_category(result: PolicyResult, workload: Workload) -> dict[str, dict[str, Any]]:
    """Acceptance for each kind of prompt, from the last round's requests."""
    groups: dict[str, list[CompletionOutput]] = defaultdict(list)
    for category, output in zip(workload.categories, result.runs[-1].outputs, strict=True):
        groups[category or "all"].extend(output.outputs)
    return {category: _acceptance(completions) for category, completions in groups.items()}


def speedups_by_category(results: Sequence[PolicyResult], workload: Workload) -> dict[str, dict[str, float]]:
    """Policy → kind of prompt → times that its requests were as fast as plain decoding's: the median of the rounds'
    ratios of tokens per second, by the requests' own times, prefill included. Empty where the host does not say when
    a request began and ended.

    Args:
        results: plain decoding's among them.
    """
    speeds = {result.name: [_speeds(run, workload) for run in result.runs] for result in results}
    return {
        name: {
            category: median(
                mine[category] / theirs[category] for mine, theirs in zip(rounds, speeds[PLAIN], strict=True)
            )
            for category in rounds[0]
            if category in speeds[PLAIN][0]
        }
        for name, rounds in speeds.items()
    }


def _speeds(run: Run, workload: Workload) -> dict[str, float]:
    """Kind of prompt → tokens per second of its requests, one after the other; empty without their times."""
    tokens: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for category, output in zip(workload.categories, run.outputs, strict=True):
        for completion in output.outputs:
            times = completion.metrics
            if not 0 < times.scheduled_s < times.finished_s:
                return {}
            tokens[category or "all"] += len(completion.token_ids)
            seconds[category or "all"] += times.finished_s - times.scheduled_s
    return {category: tokens[category] / seconds[category] for category in tokens}


def _acceptance(completions: Sequence[CompletionOutput]) -> dict[str, Any]:
    metrics = [completion.metrics for completion in completions]
    steps, accepted = sum(m.steps for m in metrics), sum(m.accepted for m in metrics)
    return {
        "continuations": len(completions),
        "output_tokens": sum(len(completion.token_ids) for completion in completions),
        "steps": steps,
        "drafted": sum(m.drafted for m in metrics),
        "accepted": accepted,
        "tokens_per_step": 1 + accepted / steps if steps else None,
    }


def _result(name: str, runs: Sequence[Run], plain: Sequence[Run]) -> PolicyResult:
    return PolicyResult(
        name=name,
        runs=tuple(runs),
        speedups=tuple(
            mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in zip(runs, plain, strict=True)
        ),
        different=sum(different(run.tokens, plain[0].tokens) for run in runs),
    )
