"""vLLM by itself, plain and with every fixed draft length, against vLLM with dynaspec: its drafter, its scheduler.

Every side is an engine in a process of its own, and waits while another has its turn.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

from dynaspec.contract.errors import ConfigError, DynaspecError
from dynaspec.hosts.vllm.launch import SCHEDULER, speculation_arguments
from dynaspec.hosts.vllm.launch_drafter import BACKEND_KEY
from dynaspec.openmp import SETTINGS

from ..statistics import best_on_odd_rounds, even_rounds, in_the_running, lower_bound, ratios, shuffled
from . import vllm_side
from .vllm_side import Load
from .vllm_workloads import SHIFT, of_round

Progress = Callable[[str, int, int], None]

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
_WAITING = tuple(SETTINGS)
"""What importing dynaspec, as this process has, says of how OpenMP's threads wait: not vLLM's way."""


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


class Side:
    """One engine.

    Args:
        python: interpreter of the environment that has vLLM.
        arguments: vLLM's engine arguments.
        log: gets what the engine prints.

    Raises:
        DynaspecError: the engine did not start, or has ended.
    """

    def __init__(self, name: str, python: Path, arguments: Mapping[str, Any], log: Path) -> None:
        self.name = name
        self._log = log
        # Not as a module of dynaspec's, and without what importing that has set here.
        environment = {name: value for name, value in os.environ.items() if name not in _WAITING}
        command = [str(python), "-P", vllm_side.__file__, json.dumps(arguments)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait_ready(self) -> str:
        """vLLM's version, when the engine has been built."""
        return str(self._answer()["ready"])

    def decode(self, load: Load) -> tuple[float, int]:
        """(seconds, tokens)."""
        if self._process.stdin is None:  # never: it was asked for
            raise DynaspecError(f"the engine {self.name!r} cannot be written to")
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["seconds"]), int(answer["tokens"])

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise DynaspecError(f"vLLM's engine {self.name!r} has ended: {' '.join(last)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run(
    python: Path,
    models: tuple[Path, Path],
    workloads: Mapping[str, Sequence[Load]],
    options: Options,
    folder: Path,
    tell: Progress,
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
