"""What vLLM's sides decode: a constant load each, and a workload that changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

import vllm_side
from dynaspec.bench.datasets import BenchPrompt
from dynaspec.bench.offline import best_on_odd_rounds, even_rounds, lower_bound, ratios
from dynaspec.bench.provenance import provenance
from dynaspec.contract.errors import ConfigError
from dynaspec.hosts.vllm.launch import BACKEND_KEY, SCHEDULER, speculation_arguments
from dynaspec.result_output import Tell, new_table
from study import SideProcess, in_the_running, shuffled
from vllm_side import Load

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


PLAIN = "plain"
OURS = "dynaspec"
"""With dynaspec's drafter in vLLM's worker, as on a CPU by default."""
SCHEDULED = "scheduler"
"""dynaspec's scheduler over vLLM's own drafter, as where there are several workers, or GPUs. That drafter keeps up with
all that the target reads even where nothing is drafted, which no scheduler can make good but by drafts."""
WANTED, WANTED_SHIFT = 0.97, 1.0
"""dynaspec's speed over the best of vLLM's sides: at a constant load, and over the workload that changes."""
_TRIAL_ROUNDS, _BEHIND = 5, 0.9
"""After so many rounds of a workload a fixed length that is for certain below this share of the best sits out."""
_STARTED_AT_ONCE = 2
"""Engines: each takes a core for half a minute, most of it to compile."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured, and how much of it."""

    policy: str = "auto"
    fixed: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    loads: tuple[int, ...] = (1, 4, 16)
    rounds: int = 11
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if self.rounds < 2 or not self.fixed or not self.loads:
            raise ConfigError(
                f"there are {self.rounds} rounds, fixed lengths {self.fixed} and loads {self.loads}; expected two "
                "rounds at least, and one of each of the others"
            )


@dataclass(frozen=True, slots=True)
class Result:
    """Every side's speed in every round, for each workload."""

    version: str
    """vLLM's."""
    rates: Mapping[str, Mapping[str, tuple[float, ...]]]
    """Workload → side → tokens/s in each round."""

    def best_rival(self, workload: str) -> str:
        """The fastest of vLLM's sides on odd rounds; over the workload that changes, of its fixed lengths."""
        spared = (OURS, SCHEDULED, PLAIN) if workload == SHIFT else (OURS, SCHEDULED)
        rivals = {side: r for side, r in self.rates[workload].items() if side not in spared}
        return best_on_odd_rounds(rivals)

    def ratio(self, workload: str, side: str, ours: str = OURS) -> tuple[float, float]:
        """dynaspec's speed over a side's: median, and its 95 % lower bound. The best rival is judged on even rounds.

        Args:
            ours: which of dynaspec's sides.
        """
        theirs = self.rates[workload][side]
        found = ratios(self.rates[workload][ours][: len(theirs)], theirs)
        if side == self.best_rival(workload):
            found = even_rounds(found)
        return median(found), lower_bound(found)


class Side(SideProcess):
    """One engine of vLLM.

    Args:
        python: interpreter of the environment that has vLLM.
        arguments: vLLM's engine arguments.
        log: gets what the engine prints.
    """

    def __init__(self, name: str, python: Path, arguments: Mapping[str, Any], log: Path) -> None:
        super().__init__(name, [str(python), "-P", vllm_side.__file__, json.dumps(arguments)], log)

    def decode(self, load: Load) -> tuple[float, int]:
        """(seconds, tokens)."""
        answer = self.ask(load)
        return float(answer["seconds"]), int(answer["tokens"])


def run(
    python: Path,
    models: tuple[Path, Path],
    workloads: Mapping[str, Sequence[Load]],
    options: Options,
    folder: Path,
    tell: Tell,
) -> Result:
    """Starts every side and lets them take turns; the first round warms them up and does not count.

    Args:
        python: interpreter of the environment that has vLLM.
        models: target and drafter.
        folder: gets what the engines print.

    Raises:
        DynaspecError: an engine did not start, or has ended.
    """
    most = max(load["concurrency"] for loads in workloads.values() for load in loads)
    with ExitStack() as stack:
        sides: list[Side] = []
        configured = _sides(models, options, most)
        names = list(configured)
        for first in range(0, len(names), _STARTED_AT_ONCE):
            tell("engines started", len(sides), len(configured))
            started = [
                stack.enter_context(Side(name, python, configured[name], folder / f"vllm-{name}.log"))
                for name in names[first : first + _STARTED_AT_ONCE]
            ]
            sides += started
            version = [side.wait_ready() for side in started][-1]
        tell("engines started", len(sides), len(sides))
        by_name = {side.name: side for side in sides}
        rates: dict[str, dict[str, list[float]]] = {name: {side.name: [] for side in sides} for name in workloads}
        left = dict.fromkeys(workloads, names)
        for number in range(options.rounds + 1):
            tell("rounds, the first of which does not count", number, options.rounds + 1)
            for name, loads in workloads.items():
                if number == _TRIAL_ROUNDS + 1:
                    left[name] = in_the_running(rates[name], _BEHIND, always=(PLAIN, SCHEDULED, OURS))
                for side in [by_name[one] for one in shuffled(left[name], number)]:
                    rate = _rate(side, [of_round(load, number) for load in loads])
                    if number:
                        rates[name][side.name].append(rate)
    return Result(version, {name: {side: tuple(found) for side, found in by.items()} for name, by in rates.items()})


def _sides(models: tuple[Path, Path], options: Options, most: int) -> dict[str, dict[str, Any]]:
    """Name → engine arguments. vLLM's own know nothing of dynaspec."""
    target, drafter = map(str, models)
    common = {
        "model": target,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": most,
        "enable_prefix_caching": False,
    }

    def drafting(longest: int) -> dict[str, Any]:
        return {"speculative_config": {"method": "draft_model", "model": drafter, "num_speculative_tokens": longest}}

    sides: dict[str, dict[str, Any]] = {PLAIN: common}
    for length in options.fixed:
        sides[f"fixed-{length}"] = {**common, **drafting(length)}
    deciding = {"scheduler_cls": SCHEDULER, "additional_config": {"dynaspec": {"policy": options.policy}}}
    sides[SCHEDULED] = {**common, **drafting(max(options.fixed)), **deciding}
    given = {"model": drafter, "policy": options.policy, BACKEND_KEY: "dynaspec"}
    sides[OURS] = {**common, **speculation_arguments(given, {})}
    return sides


def _rate(side: Side, loads: Sequence[Load]) -> float:
    parts = [side.decode(load) for load in loads]
    return sum(tokens for _, tokens in parts) / sum(seconds for seconds, _ in parts)


def as_table(result: Result) -> Table:
    """One workload a line: tokens/s of every side, and dynaspec's speed over the best of the others."""
    first = next(iter(result.rates.values()))
    fixed = [side for side in first if side not in (OURS, SCHEDULED, PLAIN)]
    columns = ("requests at once", PLAIN, *fixed, SCHEDULED, OURS, "best rival", "dynaspec over it", "over plain")
    table = new_table("vLLM: tokens/s; by itself, and with dynaspec", columns)
    for workload, rates in result.rates.items():
        best = result.best_rival(workload)
        cells = [f"{median(rates[side]):.1f}" for side in (PLAIN, *fixed, SCHEDULED, OURS)]
        table.add_row(workload, *cells, best, *(_ratio(result, workload, side) for side in (best, PLAIN)))
    return table


def verdict(result: Result) -> str:
    """What was to be reached, and whether it was."""
    missed = [
        f"{workload} ({result.ratio(workload, result.best_rival(workload))[0]:.3f})"
        for workload in result.rates
        if result.ratio(workload, result.best_rival(workload))[0] < _wanted(workload)
    ]
    wanted = f"wanted: {WANTED} of the best at every load, more than the best fixed length over what changes ({SHIFT})"
    scheduled = ", ".join(
        f"{result.ratio(workload, result.best_rival(workload), SCHEDULED)[0]:.3f} ({workload})"
        for workload in result.rates
    )
    return (
        f"{wanted}: {'reached' if not missed else 'missed at ' + ', '.join(missed)}\n"
        f"dynaspec's scheduler over vLLM's own drafter ({SCHEDULED}), over the best: {scheduled}"
    )


def as_document(result: Result, options: dict[str, Any]) -> dict[str, Any]:
    """All rounds, for programs."""
    found = {
        workload: {
            "best_rival": (best := result.best_rival(workload)),
            "ratio": dict(zip(("median", "lower_bound"), result.ratio(workload, best), strict=True)),
            "tokens_per_s": {side: list(values) for side, values in rates.items()},
        }
        for workload, rates in result.rates.items()
    }
    return {"provenance": provenance(), "vllm": result.version, "options": options, "workloads": found}


def _wanted(workload: str) -> float:
    return WANTED_SHIFT if workload == SHIFT else WANTED


def _ratio(result: Result, workload: str, side: str) -> str:
    middle, bound = result.ratio(workload, side)
    return f"{middle:.3f} (≥ {bound:.3f})"
