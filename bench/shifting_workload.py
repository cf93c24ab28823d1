"""A workload that changes, easy → hard → burst → tail, on one engine a side; and a drafter that turns against it.

auto against every fixed length and plain decoding over the whole sequence; then what an adversarial drafter costs, and
how fast auto leaves a drafter that becomes useless and comes back to it. Writes JSON and pictures.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dynaspec  # noqa: F401  # first: it sets what torch's threads read when they start

# isort: split
from rich.console import Console

from dynaspec.bench import adversary, adversary_report, shift_report
from dynaspec.bench.datasets import demo_prompts
from dynaspec.bench.progress import Tell, stages
from dynaspec.bench.provenance import provenance
from dynaspec.bench.report import make_folder, write_json
from dynaspec.bench.shift import ShiftOptions, run_shift
from dynaspec.cli.console import print_error
from dynaspec.contract.errors import DynaspecError

SECTIONS = ("shift", "adversary")


def main() -> None:
    args = _arguments()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    try:
        make_folder(args.output_dir)
        with stages() as tell:
            if "shift" in args.sections:
                shift(args, console, tell)
            if "adversary" in args.sections:
                adversarial(args, console, tell)
    except DynaspecError as error:
        print_error(str(error))
        sys.exit(2)


def shift(args: argparse.Namespace, console: Console, tell: Tell) -> None:
    quick: dict[str, Any] = {"rounds": 2, "scale": 0.25, "fixed": (1, 3, 5, 8)} if args.quick else {}
    options = ShiftOptions(policy=args.policy, **quick | ({"rounds": args.rounds} if args.rounds else {}))
    result = run_shift(args.model, args.draft_model, demo_prompts(), options, tell)
    write_json(args.output_dir / "shifting_workload.json", shift_report.as_document(result, asdict(options)))
    names = f"{Path(args.model).name} with {Path(args.draft_model).name}: a workload that changes"
    shift_report.plot_shift(result, args.output_dir / "shifting_workload.png", names)
    console.print(shift_report.as_table(result))
    console.print(shift_report.verdict(result), soft_wrap=True)


def adversarial(args: argparse.Namespace, console: Console, tell: Tell) -> None:
    prompts = [prompt.text for prompt in demo_prompts()]
    pair = (args.model, args.draft_model, prompts, tell)
    cost = adversary.measure_cost(*pair, policy=args.policy, rounds=2 if args.quick else 7)
    drift = adversary.measure_drift(*pair, policy=args.policy)
    document = {"provenance": provenance()} | adversary_report.as_document(cost, drift)
    write_json(args.output_dir / "adversary.json", document)
    adversary_report.plot_drift(drift, args.output_dir / "adversary.png", args.policy)
    for line in adversary_report.lines(cost, drift, args.policy):
        console.print(line, soft_wrap=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/models/target", help="the target's checkpoint folder")
    parser.add_argument("--draft-model", default="tests/models/draft", help="the drafter's checkpoint folder")
    parser.add_argument("--policy", default="auto", help="what is compared with plain decoding and fixed lengths")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to run (both)")
    parser.add_argument("--rounds", type=int, help="alternating rounds of the sequence (4)")
    parser.add_argument("--quick", action="store_true", help="two rounds of short phases, four fixed lengths")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for figures and pictures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
