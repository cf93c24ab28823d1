"""Closed-loop load sweep: plain decoding, fixed draft lengths and auto at 1 to 32 requests at once.

Every side decodes the same prompts (code, maths, editing; greedy) in alternating rounds. The best rival is picked on
odd rounds and compared on even ones. Prints ratios with 95 % lower bounds; writes load_sweep.json and load_sweep.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import dynaspec.engine  # noqa: F401  # first: it says how PyTorch's threads wait

# isort: split
from matplotlib.axes import Axes
from rich.table import Table
from rich.text import Text

from dynaspec.bench.datasets import BenchPrompt, demo_prompts, load_prompts, spread
from dynaspec.bench.offline import SCHEMA, best_on_odd_rounds, even_rounds, lower_bound, ratios
from dynaspec.bench.provenance import provenance
from dynaspec.cli.console import result_console
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import PLAIN
from dynaspec.engine.engine import Engine
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.pictures import BLUE, GREEN, GREY, INK, RED, new_figure, save_png, tidy
from dynaspec.result_output import Tell, make_folder, new_table, stages, write_json
from study import (
    SteadyLoop,
    Window,
    cacheable,
    endless,
    errors_told,
    in_the_running,
    mixed,
    open_sides,
    pair_parser,
    shuffled,
    steady_window,
    warm_prompts,
)

LOADS = (1, 2, 4, 8, 16, 32)
FIXED = tuple(range(1, 9))
TURNS = 5
"""Stretches of a window, between which all other sides have one of theirs."""
_PROBE_TOKENS = 24
"""Tokens a request in the first, untimed window of a load."""
_TRIAL_ROUNDS, _BEHIND = 9, 0.9
"""After so many rounds a fixed length that is below this share of the best for certain sits out the rest."""
_STRIDE = 5
"""Prompts by which the start moves on from round to round; the sides of a round have the same."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a ratio should reach."""

    median: float
    bound: float


AGAINST_BEST, AGAINST_PLAIN = Bar(0.97, 0.94), Bar(0.99, 0.97)


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """How much is measured."""

    policy: str = "auto"
    """What is compared with plain decoding and the fixed lengths."""
    loads: tuple[int, ...] = LOADS
    fixed: tuple[int, ...] = FIXED
    rounds: int = 61
    window_s: float = 0.4
    """Seconds that plain decoding takes for one window; all sides decode as many tokens, in ``TURNS`` turns."""
    request_tokens: int = 64
    longest_prompt: int = 256

    def __post_init__(self) -> None:
        if self.rounds < 2 or not self.loads or not self.fixed or min(*self.loads, *self.fixed) < 1:
            raise ConfigError(
                f"rounds are {self.rounds}, loads {list(self.loads)}, fixed lengths {list(self.fixed)}; expected at "
                "least 2 rounds, and loads and lengths of at least 1"
            )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Round by round quotients, and what they should reach."""

    rounds: tuple[float, ...]
    bar: Bar

    @property
    def median(self) -> float:
        return median(self.rounds)

    @property
    def bound(self) -> float:
        """95 % lower bound of the median."""
        return lower_bound(self.rounds)

    @property
    def holds(self) -> bool:
        return self.median >= self.bar.median and self.bound >= self.bar.bound


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load: tokens per second of every side in every round."""

    load: int
    policy: str
    rates: Mapping[str, tuple[float, ...]]
    """Fixed lengths that were far behind have fewer rounds than the others."""
    mean_draft: tuple[float, ...]
    """Tokens drafted per request and step by the policy, in every round."""

    @property
    def best(self) -> str:
        """The fastest of plain decoding and the fixed lengths on odd rounds."""
        rivals = {side: rates for side, rates in self.rates.items() if side != self.policy}
        return best_on_odd_rounds(rivals)

    @property
    def against_best(self) -> Ratio:
        """On even rounds alone."""
        found = ratios(even_rounds(self.rates[self.policy]), even_rounds(self.rates[self.best]))
        return Ratio(tuple(found), AGAINST_BEST)

    @property
    def against_plain(self) -> Ratio:
        """On all rounds: plain decoding was not chosen by them."""
        return Ratio(tuple(ratios(self.rates[self.policy], self.rates[PLAIN])), AGAINST_PLAIN)


def run_sweep(
    model: str, draft_model: str, prompts: Sequence[BenchPrompt], options: SweepOptions, progress: Tell
) -> list[LoadResult]:
    """Measures every load.

    Engines are built once, one for each side, on the same weights. Prefix caching is on, and all prompts are in the
    cache but for their last token, so that it is decoding alone that is measured: a request that starts decodes at
    once. The policy's engine keeps what it has learned, as a server would.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """
    with ExitStack() as stack:
        engines = open_sides(model, draft_model, options.fixed, options.policy, max(options.loads), stack, progress)
        tokenizer = engines[PLAIN].tokenizer
        encoded = [
            cacheable(tokenizer.encode(text.text), options.longest_prompt, BLOCK_SIZE) for text in mixed(prompts)
        ]
        for engine in engines.values():
            warm_prompts(engine, encoded, max(options.loads))
        return [_one_load(load, engines, encoded, options, progress) for load in options.loads]


def _one_load(
    load: int, engines: Mapping[str, Engine], prompts: Sequence[tuple[int, ...]], options: SweepOptions, tell: Tell
) -> LoadResult:
    """Rounds of all sides; fixed lengths that turn out far behind leave the others closer to each other in time."""
    stage = f"{load} at a time"
    tell(stage, 0, options.rounds)
    params = SamplingParams(temperature=0, max_tokens=options.request_tokens, ignore_eos=True, detokenize=False)
    warm_up = load * _PROBE_TOKENS
    for engine in engines.values():
        steady_window(engine, endless(prompts, params, 0), load, warm_up)
    speed = steady_window(engines[PLAIN], endless(prompts, params, 0), load, warm_up).tokens_per_second
    turn_tokens = max(1, round(speed * options.window_s / TURNS))
    rates: dict[str, list[float]] = {name: [] for name in engines}
    drafted = []
    left = dict(engines)
    for number in range(options.rounds):
        if number == _TRIAL_ROUNDS:
            stays = in_the_running(rates, _BEHIND, always=(PLAIN, options.policy))
            left = {name: engines[name] for name in stays}
        loops = {
            name: SteadyLoop(engine, endless(prompts, params, number * _STRIDE), load) for name, engine in left.items()
        }
        windows = _one_round(loops, turn_tokens, number)
        for name, window in windows.items():
            rates[name].append(window.tokens_per_second)
        counts = windows[options.policy].counts
        drafted.append(counts.draft_tokens / max(1, counts.request_steps))
        tell(stage, number + 1, options.rounds)
    return LoadResult(load, options.policy, {name: tuple(of_side) for name, of_side in rates.items()}, tuple(drafted))


def _one_round(loops: Mapping[str, SteadyLoop], turn_tokens: int, number: int) -> dict[str, Window]:
    """A window of each side, in turns of a fraction of it, so that the machine is the same for all in each."""
    for turn in range(1, TURNS + 1):
        for name in shuffled(list(loops), number * TURNS + turn):
            loops[name].go_on(turn * turn_tokens)
    for loop in loops.values():
        loop.close()
    return {name: loop.window for name, loop in loops.items()}


def as_table(results: Sequence[LoadResult]) -> Table:
    """One load a line: speeds, the best rival, both ratios with their bounds, and whether they hold."""
    policy = results[0].policy
    ratios_of = (f"{policy} / best (bound)", f"{policy} / plain (bound)")
    columns = ("at once", "plain", policy, "mean k", "best rival", "its tokens/s", *ratios_of)
    table = new_table(f"{policy} under load, tokens/s", columns)
    for result in results:
        table.add_row(
            str(result.load),
            f"{median(result.rates[PLAIN]):.0f}",
            f"{median(result.rates[policy]):.0f}",
            f"{median(result.mean_draft):.2f}",
            result.best,
            f"{median(result.rates[result.best]):.0f}",
            _cell(result.against_best),
            _cell(result.against_plain),
        )
    return table


def verdict(results: Sequence[LoadResult]) -> Text:
    """Whether every ratio reaches what it should, at every load."""
    missed = [
        f"{name} at {result.load}"
        for result in results
        for name, ratio in (("best", result.against_best), ("plain", result.against_plain))
        if not ratio.holds
    ]
    bars = "against the best ≥ 0.97 (bound ≥ 0.94), against plain ≥ 0.99 (bound ≥ 0.97)"
    if missed:
        return Text(f"MISSED {', '.join(missed)}: expected {bars}", style="bold red")
    return Text(f"✓ reached at every load: {bars}", style="green")


def as_document(results: Sequence[LoadResult], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, with its provenance, as JSON values."""
    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "options": dict(options),
        "loads": {
            str(result.load): {
                "tokens_per_second_rounds": {side: list(rates) for side, rates in result.rates.items()},
                "mean_draft_rounds": list(result.mean_draft),
                "best_on_odd_rounds": result.best,
                "against_best": _ratio(result.against_best),
                "against_plain": _ratio(result.against_plain),
            }
            for result in results
        },
    }


def plot_sweep(results: Sequence[LoadResult], path: Path, title: str) -> None:
    """Writes a PNG: speed-up over plain decoding by load, for every side; and the two ratios with their bounds.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(11, 4.6, title)
    left, right = figure.subplots(1, 2)
    _speedups(left, results)
    _ratios(right, results)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks([r.load for r in results], [str(r.load) for r in results])
        ax.minorticks_off()
    save_png(figure, path)


def _speedups(ax: Axes, results: Sequence[LoadResult]) -> None:
    loads = [result.load for result in results]
    policy = results[0].policy
    for side in results[0].rates:
        # Sides that sat out are compared on the rounds they took part in, which are the first.
        speedups = [median(a / b for a, b in zip(r.rates[side], r.rates[PLAIN], strict=False)) for r in results]
        if side == policy:
            ax.plot(loads, speedups, "o-", color=GREEN, linewidth=2.4, markersize=5, label=policy, zorder=4)
        elif side == PLAIN:
            ax.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label=PLAIN, zorder=3)
        else:
            k = int(side.partition(":")[2])
            ax.plot(loads, speedups, color=BLUE, alpha=0.2 + 0.08 * k, linewidth=1.2)
            ax.annotate(
                f"{k}", (loads[-1], speedups[-1]), fontsize=7, color=BLUE, xytext=(3, -2), textcoords="offset points"
            )
    ax.plot([], [], color=BLUE, linewidth=1.2, label="fixed length k")
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Tokens per second over plain decoding's", "requests at once", "times")


def _ratios(ax: Axes, results: Sequence[LoadResult]) -> None:
    policy = results[0].policy
    for colour, name, found in (
        (GREEN, f"{policy} / best of plain and fixed", [r.against_best for r in results]),
        (GREY, f"{policy} / plain", [r.against_plain for r in results]),
    ):
        loads = [r.load * (0.97 if colour == GREEN else 1.03) for r in results]
        medians = [ratio.median for ratio in found]
        ax.plot(loads, medians, "o", color=colour, markersize=6, label=name)
        ax.vlines(loads, [ratio.bound for ratio in found], medians, color=colour, linewidth=2)
    ax.axhline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.axhline(0.97, color=RED, linewidth=0.8, linestyle=(0, (1, 2)), label="0.97")
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Medians, and 95 % lower bounds", "requests at once", "ratio")


def _cell(ratio: Ratio) -> Text:
    mark = "✓" if ratio.holds else "✗"
    return Text(f"{ratio.median:.3f} ({ratio.bound:.3f}) {mark}", style="green" if ratio.holds else "red")


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return {"median": ratio.median, "bound": ratio.bound, "holds": ratio.holds, "rounds": list(ratio.rounds)}


QUICK: dict[str, Any] = {"loads": (1, 4, 16), "fixed": (1, 3, 5, 8), "rounds": 3, "window_s": 0.5}


def main() -> None:
    args = _arguments()
    given: dict[str, Any] = {
        "loads": tuple(args.loads) if args.loads else None,
        "rounds": args.rounds,
        "policy": args.policy,
    }
    settings = (QUICK if args.quick else {}) | {name: value for name, value in given.items() if value is not None}
    with errors_told():
        make_folder(args.output_dir)
        options = SweepOptions(**settings)
        prompts = demo_prompts() if args.dataset is None else spread(load_prompts(args.dataset), 24)
        with stages() as tell:
            results = run_sweep(args.model, args.draft_model, prompts, options, tell)
        write_json(args.output_dir / "load_sweep.json", as_document(results, asdict(options)))
        names = f"{Path(args.model).name} with {Path(args.draft_model).name}"
        plot_sweep(results, args.output_dir / "load_sweep.png", f"{names}: mixed prompts, greedy, closed loop")
    console = result_console(140)
    console.print(as_table(results))
    console.print(verdict(results))


def _arguments() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--dataset", type=Path, help="file of prompts (default: those that come along)")
    parser.add_argument("--policy", help="what is compared with plain decoding and fixed lengths (auto)")
    parser.add_argument("--loads", type=int, nargs="+", help="requests at once (1 2 4 8 16 32)")
    parser.add_argument("--rounds", type=int, help="alternating rounds (61)")
    parser.add_argument("--quick", action="store_true", help="three loads, four lengths, three short rounds")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for figures and picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
