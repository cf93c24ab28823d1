"""A workload that changes, easy → hard → burst → tail, on one engine a side; and a drafter that turns against it.

auto against every fixed length and plain decoding over the whole sequence; then what an adversarial drafter costs, and
how fast auto leaves a drafter that becomes useless and comes back to it. Writes JSON and pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import dynaspec.engine  # noqa: F401  # first: it says how PyTorch's threads wait

# isort: split
import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table
from rich.text import Text

import adversary
from dynaspec.bench.datasets import BenchPrompt, demo_prompts
from dynaspec.bench.decoders import Job, StepTrace, run_all
from dynaspec.bench.offline import SCHEMA, best_on_odd_rounds, even_rounds, lower_bound, ratios
from dynaspec.bench.provenance import provenance
from dynaspec.cli.console import result_console
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import PLAIN
from dynaspec.engine.engine import Engine
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.pictures import BLUE, GREEN, GREY, INK, new_figure, save_png, tidy
from dynaspec.result_output import Tell, make_folder, new_table, stages, write_json
from load_sweep import FIXED
from study import cacheable, errors_told, mixed, open_sides, pair_parser, shuffled, warm_prompts

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
    model: str, draft_model: str, prompts: Sequence[BenchPrompt], options: ShiftOptions, progress: Tell
) -> ShiftResult:
    """Every side runs the whole sequence in every round; which begins changes. Engines keep their state.

    Prompts lie in the prefix cache, so that it is decoding that is compared; the same for all sides.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    with ExitStack() as stack:
        engines = open_sides(model, draft_model, options.fixed, options.policy, BURST, stack, progress)
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


_BINS = 24
"""Points of a curve in each phase."""


def as_table(result: ShiftResult) -> Table:
    """One side a line: tokens per second of every phase and of the whole sequence."""
    table = new_table("Tokens/s, medians over the rounds", ("side", *result.phases, "all"), left=("side",))
    best = {p: max(result.runs, key=lambda side: median(result.rates(side, p))) for p in (*result.phases, None)}
    for side in result.runs:
        cells = [
            Text(f"{median(result.rates(side, p)):.0f}", style="bold green" if best[p] == side else "")
            for p in (*result.phases, None)
        ]
        table.add_row(Text(side, style="bold" if side in (result.policy, result.best_fixed) else ""), *cells)
    return table


def verdict(result: ShiftResult) -> Text:
    """The two ratios over the whole sequence, and whether the first is what is wanted."""
    found, bound = result.ratio(result.best_fixed)
    plain, plain_bound = result.ratio(PLAIN)
    line = (
        f"{result.policy} over {result.best_fixed}, the best fixed length: {found:.3f} ({_bound(bound)}), expected "
        f"≥ {WANTED}; over plain decoding: {plain:.3f} ({_bound(plain_bound)})"
    )
    if result.different:
        line += f"; {result.different} OUTPUTS DIFFER from plain decoding's"
    return Text(line, style="green" if found >= WANTED and not result.different else "bold red")


def _bound(bound: float | None) -> str:
    return "one round, no bound" if bound is None else f"bound {bound:.3f}"


def as_document(result: ShiftResult, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the single steps, with its provenance, as JSON values."""
    ratios = {name: result.ratio(side) for name, side in (("best_fixed", result.best_fixed), ("plain", PLAIN))}
    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "options": dict(options),
        "best_fixed": result.best_fixed,
        "ratios": {name: {"median": m, "bound": b} for name, (m, b) in ratios.items()},
        "different_outputs": result.different,
        "tokens_per_second_rounds": {
            side: {phase or "all": list(result.rates(side, phase)) for phase in (*result.phases, None)}
            for side in result.runs
        },
    }


def plot_shift(result: ShiftResult, path: Path, title: str) -> None:
    """Writes a PNG: tokens per second and mean draft length over the work done, for three sides in the last round.

    The horizontal axis is the share of a phase's tokens, so that the sides can be compared where they do the same.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 6, title)
    speed, drafts = figure.subplots(2, 1, sharex=True)
    for side, colour, width in ((PLAIN, GREY, 1.4), (result.best_fixed, BLUE, 1.6), (result.policy, GREEN, 2.2)):
        for i, phase in enumerate(result.phases):
            steps = result.runs[side][-1][phase].steps
            places = i + (np.arange(_BINS) + 0.5) / _BINS
            label = side if i == 0 else None
            for ax, curve in ((speed, _rate(steps)), (drafts, _draft(steps))):
                seen = np.isfinite(curve)
                ax.plot(places[seen], curve[seen], color=colour, linewidth=width, label=label)
    speed.set_yscale("log")
    for ax in (speed, drafts):
        _phases(ax, result.phases)
    speed.legend(frameon=False, fontsize=8.5, ncols=3, loc="lower right")
    tidy(speed, "Speed", "", "tokens per second")
    tidy(drafts, "Mean draft length", "phase; within it, share of its tokens", "tokens per request and step")
    save_png(figure, path)


def _phases(ax: Axes, names: Sequence[str]) -> None:
    ax.set_xticks([i + 0.5 for i in range(len(names))], names)
    ax.set_xlim(0, len(names))
    for i in range(1, len(names)):
        ax.axvline(i, color=INK, linewidth=0.7, linestyle=(0, (1, 2)))


def _binned(steps: Sequence[StepTrace], values: Sequence[float]) -> np.ndarray:
    """[bins] sums of a value over the steps, by the share of the tokens emitted when each step ended."""
    emitted = np.cumsum([step.counts.emitted for step in steps], dtype=np.float64)
    share = emitted / max(1.0, float(emitted[-1]))
    place = np.minimum((share * _BINS).astype(np.int64), _BINS - 1)
    sums: np.ndarray = np.bincount(place, weights=np.asarray(values, dtype=np.float64), minlength=_BINS)
    return sums


def _rate(steps: Sequence[StepTrace]) -> np.ndarray:
    return _quotient(steps, [s.counts.emitted for s in steps], [s.seconds for s in steps])


def _draft(steps: Sequence[StepTrace]) -> np.ndarray:
    return _quotient(steps, [s.counts.draft_tokens for s in steps], [s.counts.request_steps for s in steps])


def _quotient(steps: Sequence[StepTrace], above: Sequence[float], below: Sequence[float]) -> np.ndarray:
    """Not a number where a bin has no step."""
    bottom = _binned(steps, below)
    found: np.ndarray = np.divide(_binned(steps, above), bottom, out=np.full(_BINS, np.nan), where=bottom > 0)
    return found


SECTIONS = ("shift", "adversary")


def main() -> None:
    args = _arguments()
    console = result_console()
    with errors_told():
        make_folder(args.output_dir)
        with stages() as tell:
            if "shift" in args.sections:
                shift(args, console, tell)
            if "adversary" in args.sections:
                adversarial(args, console, tell)


def shift(args: argparse.Namespace, console: Console, tell: Tell) -> None:
    quick: dict[str, Any] = {"rounds": 2, "scale": 0.25, "fixed": (1, 3, 5, 8)} if args.quick else {}
    options = ShiftOptions(policy=args.policy, **quick | ({"rounds": args.rounds} if args.rounds else {}))
    result = run_shift(args.model, args.draft_model, demo_prompts(), options, tell)
    write_json(args.output_dir / "shifting_workload.json", as_document(result, asdict(options)))
    names = f"{Path(args.model).name} with {Path(args.draft_model).name}: a workload that changes"
    plot_shift(result, args.output_dir / "shifting_workload.png", names)
    console.print(as_table(result))
    console.print(verdict(result), soft_wrap=True)


def adversarial(args: argparse.Namespace, console: Console, tell: Tell) -> None:
    prompts = [prompt.text for prompt in demo_prompts()]
    pair = (args.model, args.draft_model, prompts, tell)
    cost = adversary.measure_cost(*pair, policy=args.policy, rounds=2 if args.quick else 7)
    drift = adversary.measure_drift(*pair, policy=args.policy)
    document = {"provenance": provenance()} | adversary.as_document(cost, drift)
    write_json(args.output_dir / "adversary.json", document)
    adversary.plot_drift(drift, args.output_dir / "adversary.png", args.policy)
    for line in adversary.lines(cost, drift, args.policy):
        console.print(line, soft_wrap=True)


def _arguments() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--policy", default="auto", help="what is compared with plain decoding and fixed lengths")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to run (both)")
    parser.add_argument("--rounds", type=int, help="alternating rounds of the sequence (4)")
    parser.add_argument("--quick", action="store_true", help="two rounds of short phases, four fixed lengths")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for figures and pictures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
