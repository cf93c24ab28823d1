"""A workload that changes: easy → hard → burst → tail, all of it on one engine a side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.engine import Engine
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.model.batch import BLOCK_SIZE

from .datasets import BenchPrompt
from .drive import Job, StepTrace, cacheable, run_all, warm_prompts
from .policies import PLAIN
from .statistics import best_on_odd_rounds, even_rounds, lower_bound, ratios, shuffled
from .sweep import FIXED, SweepOptions, mixed, open_sides

Progress = Callable[[str, int, int], None]

WANTED = 1.10
"""Speed over that of the best fixed length, over the whole sequence."""
EASY_KINDS = ("editing", "maths")
"""Kinds of the prompts that come along on which the drafter is mostly right."""
BURST = 64
"""Requests at a time when most come."""
_RANDOM_PROMPT = 97
"""Tokens of a prompt without sense."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one kind, so many at a time."""

    name: str
    jobs: tuple[Job, ...]
    concurrency: int


@dataclass(frozen=True, slots=True)
class ShiftOptions:
    """How much is measured."""

    policy: str = "auto"
    fixed: tuple[int, ...] = FIXED
    rounds: int = 4
    scale: float = 1.0
    """Length of every phase; 1 = about two seconds of plain decoding each on two cores."""

    def __post_init__(self) -> None:
        if self.rounds < 2 or not self.scale > 0:
            raise ConfigError(f"rounds are {self.rounds}, scale {self.scale}; expected at least 2, and above 0")


@dataclass(frozen=True, slots=True)
class PhaseTrace:
    """One phase of one side."""

    seconds: float
    tokens: int
    steps: tuple[StepTrace, ...]


PhaseTraces = Mapping[str, PhaseTrace]
"""Phase → what happened; one run over all phases."""


@dataclass(frozen=True, slots=True)
class ShiftResult:
    """Every side's runs over the whole sequence."""

    policy: str
    runs: Mapping[str, tuple[PhaseTraces, ...]]
    different: int
    """Outputs that were not plain decoding's of the same round, token for token."""

    def rates(self, side: str, phase: str | None = None) -> tuple[float, ...]:
        """Tokens per second in every round, of one phase or of all together."""
        found = []
        for run in self.runs[side]:
            traces = [trace for name, trace in run.items() if phase in (None, name)]
            found.append(sum(t.tokens for t in traces) / sum(t.seconds for t in traces))
        return tuple(found)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(self.runs[self.policy][0])

    @property
    def best_fixed(self) -> str:
        """The fixed length with the largest speed over the whole sequence, on odd rounds."""
        return best_on_odd_rounds({s: self.rates(s) for s in self.runs if s not in (self.policy, PLAIN)})

    def ratio(self, side: str) -> tuple[float, float | None]:
        """The policy's speed over a side's, over the whole sequence: median and 95 % lower bound; None: one round has
        none.

        Against the best fixed length on even rounds alone, since odd ones have chosen it.
        """
        rounds = ratios(self.rates(self.policy), self.rates(side))
        if side == self.best_fixed:
            rounds = even_rounds(rounds)
        return median(rounds), lower_bound(rounds) if len(rounds) > 1 else None


def make_phases(prompts: Sequence[BenchPrompt], tokenizer: Tokenizer, vocab_size: int, scale: float) -> list[Phase]:
    """What a server may see in a day. All requests are greedy or seeded, so that every side decodes the same tokens.

    * easy: text that repeats itself, one request at a time;
    * hard: prompts of random tokens, continued at temperature 1.3, eight at a time: there the drafter is mostly wrong;
    * burst: mixed prompts, 64 at a time;
    * tail: one long answer that remains when all others are done.
    """
    easy = [prompt for prompt in prompts if prompt.category in EASY_KINDS] or list(prompts)
    everything = mixed(prompts)
    rng = np.random.default_rng(_SEED)

    def encoded(some: Sequence[BenchPrompt], count: int) -> list[tuple[int, ...]]:
        return [cacheable(tokenizer.encode(some[i % len(some)].text), 256, BLOCK_SIZE) for i in range(count)]

    def count(requests: int) -> int:
        return max(1, round(requests * scale))

    nonsense = [tuple(rng.integers(1, vocab_size, _RANDOM_PROMPT).tolist()) for _ in range(count(24))]
    greedy = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=128)
    return [
        Phase("easy", _jobs(encoded(easy, count(6)), greedy), 1),
        Phase("hard", _jobs(nonsense, replace(greedy, temperature=1.3)), 8),
        Phase("burst", _jobs(encoded(everything, count(128)), replace(greedy, max_tokens=48)), BURST),
        Phase("tail", _jobs(encoded(everything[1:], 1), replace(greedy, max_tokens=max(32, round(640 * scale)))), 1),
    ]


def _jobs(prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> tuple[Job, ...]:
    """Seeds differ from request to request, so that equal prompts differ; greedy ones need none."""
    seeded = [params if params.greedy else replace(params, seed=i) for i in range(len(prompts))]
    return tuple(Job(prompt, one) for prompt, one in zip(prompts, seeded, strict=True))


def run_shift(
    model: str, draft_model: str, prompts: Sequence[BenchPrompt], options: ShiftOptions, progress: Progress
) -> ShiftResult:
    """Every side runs the whole sequence in every round; which begins changes. Engines keep their state.

    Prompts lie in the prefix cache, so that it is decoding that is compared; the same for all sides.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    with ExitStack() as stack:
        sizes = SweepOptions(policy=options.policy, loads=(BURST,), fixed=options.fixed)
        engines = open_sides(model, draft_model, sizes, stack, progress)
        tokenizer = engines[PLAIN].tokenizer
        phases = make_phases(prompts, tokenizer, tokenizer.vocab_size, options.scale)
        for engine in engines.values():
            for phase in phases:
                warm_prompts(engine, [job.prompt for job in phase.jobs], phase.concurrency)
        names = list(engines)
        runs: dict[str, list[PhaseTraces]] = {name: [] for name in names}
        different = done = 0
        for turn in range(options.rounds):
            outputs = {}
            for name in shuffled(names, turn):
                run, outputs[name] = _run(engines[name], phases)
                runs[name].append(run)
                done += 1
                progress("sequences", done, options.rounds * len(names))
            different += sum(
                mine != theirs for found in outputs.values() for mine, theirs in zip(found, outputs[PLAIN], strict=True)
            )
        return ShiftResult(options.policy, {name: tuple(of_side) for name, of_side in runs.items()}, different)


def _run(engine: Engine, phases: Sequence[Phase]) -> tuple[dict[str, PhaseTrace], list[tuple[int, ...]]]:
    traces: dict[str, PhaseTrace] = {}
    outputs: list[tuple[int, ...]] = []
    for phase in phases:
        done = run_all(engine, phase.jobs, phase.concurrency)
        traces[phase.name] = PhaseTrace(done.seconds, done.output_tokens, done.steps)
        outputs += done.outputs
    return traces, outputs
