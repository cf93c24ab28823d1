"""Closed-loop load sweep: plain decoding, fixed draft lengths and auto at 1 to 32 requests at once.

Every side decodes the same prompts (code, maths, editing; greedy) in alternating rounds. The best rival is picked on
odd rounds and compared on even ones. Prints ratios with 95 % lower bounds; writes load_sweep.json and load_sweep.png.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import dynaspec  # noqa: F401  # first: it sets what torch's threads read when they start

# isort: split
from rich.console import Console

from dynaspec.bench.datasets import demo_prompts, load_prompts, spread
from dynaspec.bench.progress import stages
from dynaspec.bench.report import make_folder, write_json
from dynaspec.bench.sweep import SweepOptions, run_sweep
from dynaspec.bench.sweep_report import as_document, as_table, plot_sweep, verdict
from dynaspec.cli.console import print_error
from dynaspec.contract.errors import DynaspecError

QUICK = {"loads": (1, 4, 16), "fixed": (1, 3, 5, 8), "rounds": 3, "window_s": 0.5}


def main() -> None:
    args = _arguments()
    given = {"loads": tuple(args.loads) if args.loads else None, "rounds": args.rounds, "policy": args.policy}
    settings = (QUICK if args.quick else {}) | {name: value for name, value in given.items() if value is not None}
    try:
        make_folder(args.output_dir)
        options = SweepOptions(**settings)
        prompts = demo_prompts() if args.dataset is None else spread(load_prompts(args.dataset), 24)
        with stages() as tell:
            results = run_sweep(args.model, args.draft_model, prompts, options, tell)
        write_json(args.output_dir / "load_sweep.json", as_document(results, asdict(options)))
        names = f"{Path(args.model).name} with {Path(args.draft_model).name}"
        plot_sweep(results, args.output_dir / "load_sweep.png", f"{names}: mixed prompts, greedy, closed loop")
    except DynaspecError as error:
        print_error(str(error))
        sys.exit(2)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(as_table(results))
    console.print(verdict(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/models/target", help="the target's checkpoint folder")
    parser.add_argument("--draft-model", default="tests/models/draft", help="the drafter's checkpoint folder")
    parser.add_argument("--dataset", type=Path, help="file of prompts (default: those that come along)")
    parser.add_argument("--policy", help="what is compared with plain decoding and fixed lengths (auto)")
    parser.add_argument("--loads", type=int, nargs="+", help="requests at once (1 2 4 8 16 32)")
    parser.add_argument("--rounds", type=int, help="alternating rounds (61)")
    parser.add_argument("--quick", action="store_true", help="three loads, four lengths, three short rounds")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for figures and picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
