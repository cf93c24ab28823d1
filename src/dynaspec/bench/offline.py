"""Policies side by side in one process: same prompts, alternating rounds, medians, and equality with plain decoding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from dynaspec.contract.errors import ConfigError, DynaspecError
from dynaspec.contract.outputs import CompletionOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import PLAIN, PolicySpec
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.format import number_text
from dynaspec.result_output import new_table

from .datasets import BenchPrompt, fit
from .decoders import Decoder, DecodingHost, OpenDecoder, TimedRun, different, run_once
from .provenance import provenance

_DRAWS = 4000
Progress = Callable[[str], None]
"""Told what is about to run."""
SCHEMA = 1
"""Of the JSON file; grows when a key changes its meaning."""
_SHOWN_POSITIONS = 6
_COLUMNS = ("policy", "tokens/s", "speed-up", "length", "accepted", "per position", "passes", "time", "identical")


def rotated(sides: Sequence[str], turn: int) -> list[str]:
    """The order of a round: it begins one further each time."""
    first = turn % len(sides)
    return [*sides[first:], *sides[:first]]


def lower_bound(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> float:
    """One-sided lower confidence bound of the median: a percentile bootstrap (Efron, 1979).

    Raises:
        ConfigError: no values.
    """
    if not values:
        raise ConfigError("there are no values; expected at least one to take a bound of")
    drawn = np.random.default_rng(seed).choice(np.asarray(values, dtype=np.float64), (_DRAWS, len(values)))
    # "lower": a bound between two values would claim more than was seen.
    return float(np.quantile(np.median(drawn, axis=1), 1.0 - level, method="lower"))


def odd_rounds(rounds: Sequence[float]) -> list[float]:
    """Rounds 1, 3, 5, …, counted from 1."""
    return list(rounds[::2])


def even_rounds(rounds: Sequence[float]) -> list[float]:
    """Rounds 2, 4, 6, …"""
    return list(rounds[1::2])


def best_on_odd_rounds(rates: Mapping[str, Sequence[float]]) -> str:
    """The side with the largest median on odd rounds, of those that took part in all. Compare it on even ones: the
    winner of a noisy contest was also lucky, and its luck must not count.

    Args:
        rates: side → one figure a round, at least one.
    """
    rounds = max(map(len, rates.values()))
    rivals = [side for side, of_side in rates.items() if len(of_side) == rounds]
    return max(rivals, key=lambda side: median(odd_rounds(rates[side])))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round: what slows the machine for a while slows both sides of a round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


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
    runs: tuple[TimedRun, ...]
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
    return results_of(all_rounds(decoders, workload, progress))


def all_rounds(decoders: Mapping[str, Decoder], workload: Workload, progress: Progress) -> dict[str, list[TimedRun]]:
    """Every policy's rounds, after a warm-up: what is loaded, compiled or learnt at first is not measured."""
    for name, decoder in decoders.items():
        progress(f"{name}: warm-up")
        run_once(decoder, workload.prompts[:1], workload.params)
    runs: dict[str, list[TimedRun]] = {name: [] for name in decoders}
    for turn in range(workload.rounds):
        for name in rotated(list(decoders), turn):
            progress(f"{name}: round {turn + 1} of {workload.rounds}")
            runs[name].append(run_once(decoders[name], workload.prompts, workload.params))
    return runs


def results_of(runs: Mapping[str, Sequence[TimedRun]]) -> list[PolicyResult]:
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


def _speeds(run: TimedRun, workload: Workload) -> dict[str, float]:
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


def _result(name: str, runs: Sequence[TimedRun], plain: Sequence[TimedRun]) -> PolicyResult:
    return PolicyResult(
        name=name,
        runs=tuple(runs),
        speedups=tuple(
            mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in zip(runs, plain, strict=True)
        ),
        different=sum(different(run.tokens, plain[0].tokens) for run in runs),
    )


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
    host: DecodingHost,
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
        runs: dict[str, list[TimedRun]] = {}
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
                    runs |= all_rounds({spec.name: decoder}, work, progress)
        if left_out and len(left_out) == len(specs) - 1:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise ConfigError(f"nothing is left to compare with plain decoding ({reasons})")
        results = compare(opened, work, progress) if host.alternating else results_of(runs)
        return Session(work, tuple(results), cut, left_out)


def as_table(results: Sequence[PolicyResult], title: str) -> Table:
    """One policy a line.

    The acceptance length, the share of drafts accepted, in all and per position; then the passes and times of one
    round, the target's before the drafter's.
    """
    table = new_table(title, _COLUMNS, left=("policy", "per position"))
    fastest = max(result.tokens_per_second for result in results)
    for result in results:
        counts = result.counts
        style = "bold green" if result.tokens_per_second == fastest else ""
        table.add_row(
            Text(result.name, style=style),
            Text(f"{result.tokens_per_second:.1f}", style=style),
            Text(f"{result.speedup:.2f}×", style=style),
            number_text(counts.mean_acceptance_length),
            percent_text(counts.draft_acceptance_rate),
            rates_text(counts.rate_per_position),
            f"{counts.target_passes} / {counts.drafter_passes}",
            _seconds(counts),
            identical_text(result),
        )
    return table


def identical_text(result: PolicyResult) -> Text:
    """Whether every output was plain decoding's."""
    return Text("yes", style="green") if result.identical else Text(f"NO ({result.different})", style="bold red")


def percent_text(share: float | None) -> str:
    """A share in per cent; a dash for None."""
    return "-" if share is None else f"{100 * share:.0f} %"


def rates_text(rates: Sequence[float]) -> str:
    """Acceptance rates, position by position."""
    shown = " ".join(f"{rate:.2f}".removeprefix("0") for rate in rates[:_SHOWN_POSITIONS])
    return (shown + " …" if len(rates) > _SHOWN_POSITIONS else shown) or "-"


def _seconds(counts: SpecCounts) -> str:
    """Hosts that cannot tell drafting from verifying know whole steps; plain decoding on a host, nothing."""
    if counts.verify_s or counts.draft_s:
        return f"{counts.verify_s:.2f} / {counts.draft_s:.2f} s"
    return f"{counts.step_s:.2f} s" if counts.step_s else "-"
