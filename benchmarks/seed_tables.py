"""The tables that the policies were published with, re-run on a pair of one's own: dynamic, dsl, elastic.

Prints Markdown; writes it and JSON. Profiles for the section dynamic are taken on the data that is decoded and on
another set, so that it shows what a profile of the wrong data costs, with and without online rates.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import dynaspec.engine  # noqa: F401  # first: it says how PyTorch's threads wait

# isort: split
from dynaspec.bench.datasets import Dataset, fit, load_dataset, spread
from dynaspec.bench.decoders import Job, SharedModels, open_engine, run_all
from dynaspec.bench.offline import SCHEMA, rotated
from dynaspec.bench.profiling import Cells, Grid, measure, prompt_room
from dynaspec.bench.provenance import provenance
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.policies.short_names import PLAIN, PolicySpec, parse_policy
from dynaspec.control.profile import Profile
from dynaspec.engine.engine import Engine
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.result_output import Tell, as_markdown, make_folder, stages, write_json, write_text
from study import Window, cacheable, endless, errors_told, mixed, pair_parser, steady_window, warm_prompts

Row = dict[str, Any]
"""Column → value."""

_PROMPTS = 24
_LONGEST_PROMPT = 256
_REQUEST_TOKENS = 64
_PROFILE_LENGTHS = (1, 3, 5)
STATIC = "constant:5"


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How much is measured."""

    model: str
    draft_model: str
    data: tuple[Dataset, ...]
    """The one that is decoded; then those that profiles are taken on, besides it."""
    loads: tuple[int, ...] = (1, 4, 16, 32)
    rounds: int = 3
    window_tokens: int = 256
    """Tokens of each window, for every request that runs at once up to eight."""
    thresholds: tuple[float, ...] = (0.2, 0.4, 0.5, 0.6, 0.8)
    longest: tuple[int, ...] = (5, 10, 20)
    gates: tuple[float, ...] = (0.0, 0.3, 0.5, 0.7)

    def __post_init__(self) -> None:
        if not self.data or self.rounds < 1 or not self.loads:
            raise ConfigError("there is no data set, no load or no round; expected one of each at least")


@dataclass(frozen=True, slots=True)
class Measured:
    """One side at one load: windows of all rounds."""

    windows: tuple[Window, ...]
    load: int

    @property
    def tokens_per_second(self) -> float:
        return median(window.tokens_per_second for window in self.windows)

    @property
    def ms_per_output_token(self) -> float:
        """Of one request: the time between two of its tokens, in the mean."""
        return 1e3 * self.load / self.tokens_per_second


def measure_sides(
    specs: Mapping[str, PolicySpec], options: TableOptions, stage: str, progress: Tell
) -> dict[int, dict[str, Measured]]:
    """Load → side → windows, in alternating rounds; engines keep their state, prompts come from the prefix cache."""
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        load_model = SharedModels()
        for done, (name, spec) in enumerate(specs.items()):
            progress(f"{stage}: loading", done, len(specs))
            engines[name] = open_engine(options.model, spec, load=load_model, max_num_seqs=max(options.loads))
            stack.callback(engines[name].close)
        progress(f"{stage}: loading", len(specs), len(specs))
        prompts = _prompts(engines[PLAIN], options.data[0])
        for engine in engines.values():
            warm_prompts(engine, prompts, max(options.loads))
        results: dict[int, dict[str, Measured]] = {}
        total, done = len(options.loads) * options.rounds * len(specs), 0
        for load in options.loads:
            windows: dict[str, list[Window]] = {name: [] for name in specs}
            tokens = options.window_tokens * min(load, 8)
            for turn in range(options.rounds):
                for name in rotated(list(specs), turn):
                    jobs = endless(prompts, _params(), turn)
                    windows[name].append(steady_window(engines[name], jobs, load, tokens))
                    done += 1
                    progress(stage, done, total)
            results[load] = {name: Measured(tuple(of_side), load) for name, of_side in windows.items()}
        return results


def dynamic_table(options: TableOptions, progress: Tell) -> list[Row]:
    """Milliseconds per output token by batch size: plain, five tokens, and Dynamic SD under several profiles."""
    with tempfile.TemporaryDirectory() as folder:
        profiles = {
            data.label: take_profile(options, data, Path(folder) / f"{i}.json", progress)
            for i, data in enumerate(options.data)
        }
        specs = {PLAIN: PolicySpec(PLAIN, None), STATIC: parse_policy(STATIC, options.draft_model)}
        for label, path in profiles.items():
            specs[f"goodput, {label}"] = parse_policy(f"goodput:{path}", options.draft_model)
            online = path.with_suffix(".online.json")
            replace(Profile.load(path), is_online=True).save(online)
            specs[f"goodput, {label}, online"] = parse_policy(f"goodput:{online}", options.draft_model)
        results = measure_sides(specs, options, "dynamic", progress)
    return [
        {"requests": load} | {f"{name} (ms)": round(side.ms_per_output_token, 3) for name, side in sides.items()}
        for load, sides in results.items()
    ]


def dsl_table(options: TableOptions, progress: Tell) -> list[Row]:
    """Tokens per second over plain decoding's and over five tokens', by threshold, longest draft and concurrency."""
    specs = {PLAIN: PolicySpec(PLAIN, None), STATIC: parse_policy(STATIC, options.draft_model)}
    grid = [(threshold, longest) for longest in options.longest for threshold in options.thresholds]
    specs |= {
        f"confidence:{threshold}:{longest}": parse_policy(f"confidence:{threshold}:{longest}", options.draft_model)
        for threshold, longest in grid
    }
    rows = []
    for load, sides in measure_sides(specs, options, "dsl", progress).items():
        for threshold, longest in grid:
            side = sides[f"confidence:{threshold}:{longest}"]
            counts = side.windows[-1].counts
            rows.append(
                {
                    "requests": load,
                    "threshold": threshold,
                    "longest": longest,
                    "tokens/s": round(side.tokens_per_second, 1),
                    "over plain": round(side.tokens_per_second / sides[PLAIN].tokens_per_second, 3),
                    f"over {STATIC}": round(side.tokens_per_second / sides[STATIC].tokens_per_second, 3),
                    "acceptance length": _rounded(counts.mean_acceptance_length),
                    "early exits": _rounded(counts.early_exits / counts.proposals if counts.proposals else None),
                }
            )
    return rows


def elastic_table(options: TableOptions, progress: Tell) -> list[Row]:
    """Latency of whole requests, and the drafter's KV writes, by ladder and gate."""
    ladders = {"5/10/15": "elastic:5/10/15", "5": "elastic:5", "10": "elastic:10", "15": "elastic:15"}
    names = {(ladder, gate): f"{form}:{gate}" for ladder, form in ladders.items() for gate in options.gates}
    specs = {PLAIN: PolicySpec(PLAIN, None)}
    specs |= {name: parse_policy(name, options.draft_model) for name in names.values()}
    rows = []
    for load in options.loads:
        found = _latencies(specs, options, load, progress)
        plain = median(run.seconds for run in found[PLAIN])
        for (ladder, gate), name in names.items():
            runs = found[name]
            counts = runs[-1].counts
            rows.append(
                {
                    "requests": load,
                    "lengths": ladder,
                    "gate": gate,
                    "latency (s)": round(median(run.seconds for run in runs), 3),
                    "over plain": round(median(run.seconds for run in runs) / plain, 3),
                    "mean draft": _rounded(counts.draft_tokens / counts.request_steps),
                    "acceptance": _rounded(counts.draft_acceptance_rate),
                    "KV writes skipped": counts.kv_skipped,
                    "KV writes redone": counts.kv_redone,
                }
            )
    return rows


SECTIONS: Mapping[str, Callable[[TableOptions, Tell], list[Row]]] = {
    "dynamic": dynamic_table,
    "dsl": dsl_table,
    "elastic": elastic_table,
}


def take_profile(options: TableOptions, data: Dataset, path: Path, progress: Tell) -> Path:
    """Profiles the pair on a data set, coarsely; returns the file."""
    grid = Grid(options.loads, _PROFILE_LENGTHS, batches=1)
    spec = parse_policy(f"constant:{grid.longest}", options.draft_model)
    engine = open_engine(options.model, spec, max_num_seqs=max(options.loads))
    try:
        prompts = fit(
            spread(data.prompts, _PROMPTS),
            engine.tokenizer,
            min(_LONGEST_PROMPT, prompt_room(engine.max_model_len, grid)),
        )
        cells = Cells(path.with_suffix(".cells"), {})
        params = SamplingParams(temperature=0, detokenize=False)

        def tell(stage: str, done: int, total: int) -> None:
            progress(f"profile on {data.label}: {stage}", done, total)

        measure(engine, grid, prompts.token_ids, params, cells, tell).save(path)
    finally:
        engine.close()
    return path


def _latencies(
    specs: Mapping[str, PolicySpec], options: TableOptions, load: int, progress: Tell
) -> dict[str, list[Window]]:
    """Side → one window a round, from the first request to the end of the last of a fixed set of requests."""
    with ExitStack() as stack:
        engines = {}
        load_model = SharedModels()
        for name, spec in specs.items():
            engines[name] = open_engine(options.model, spec, load=load_model, max_num_seqs=load)
            stack.callback(engines[name].close)
        prompts = _prompts(engines[PLAIN], options.data[0])
        jobs = [Job(prompts[i % len(prompts)], _params()) for i in range(max(4, load))]
        for engine in engines.values():
            warm_prompts(engine, prompts, load)
        found: dict[str, list[Window]] = {name: [] for name in specs}
        order = [name for turn in range(options.rounds) for name in rotated(list(specs), turn)]
        for done, name in enumerate(order):
            before = engines[name].stats()
            run = run_all(engines[name], jobs, load)
            found[name].append(Window(run.seconds, engines[name].stats() - before))
            progress(f"elastic, {load} at once", done + 1, options.rounds * len(specs))
        return found


def _prompts(engine: Engine, data: Dataset) -> list[tuple[int, ...]]:
    texts = mixed(spread(data.prompts, _PROMPTS))
    return [cacheable(engine.tokenizer.encode(text.text), _LONGEST_PROMPT, BLOCK_SIZE) for text in texts]


def _params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=_REQUEST_TOKENS, ignore_eos=True, detokenize=False)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


QUICK: dict[str, Any] = {
    "loads": (1, 8), "rounds": 1, "window_tokens": 64, "thresholds": (0.4, 0.6), "longest": (10,), "gates": (0.0, 0.5),
}  # fmt: skip


def main() -> None:
    args = _arguments()
    with errors_told():
        make_folder(args.output_dir)
        options = TableOptions(args.model, args.draft_model, _data(args), **(QUICK if args.quick else {}))
        with stages() as tell:
            tables = {name: SECTIONS[name](options, tell) for name in args.sections}
        document = {"schema": SCHEMA, "provenance": provenance(), "tables": tables}
        write_json(args.output_dir / "seed_tables.json", document)
        text = "\n".join(f"## {name}\n\n{as_markdown(rows)}" for name, rows in tables.items())
        write_text(args.output_dir / "seed_tables.md", text)
    print(text)


def _data(args: argparse.Namespace) -> tuple[Dataset, ...]:
    """What is decoded, then what profiles are taken on besides: by default maths, and code."""
    if args.dataset is not None:
        return tuple(load_dataset(None, path) for path in (args.dataset, args.other_dataset) if path is not None)
    demo = load_dataset(None, None)
    maths = tuple(prompt for prompt in demo.prompts if prompt.category == "maths")
    code = tuple(prompt for prompt in demo.prompts if prompt.category != "maths")
    return Dataset("maths", maths), Dataset("code", code)


def _arguments() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--dataset", type=Path, help="file of the prompts that are decoded (default: maths)")
    parser.add_argument("--other-dataset", type=Path, help="file of other prompts to take a profile on (default: code)")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="tables to make")
    parser.add_argument("--quick", action="store_true", help="small grids, one round")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for Markdown and figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
