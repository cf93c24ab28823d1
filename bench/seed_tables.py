"""The tables that the policies were published with, re-run on a pair of one's own: dynamic, dsl, elastic.

Prints Markdown; writes it and JSON. Profiles for the section dynamic are taken on the data that is decoded and on
another set, so that it shows what a profile of the wrong data costs, with and without online rates.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import dynaspec  # noqa: F401  # first: it sets what torch's threads read when they start

# isort: split
from dynaspec.bench.datasets import Dataset, load_dataset
from dynaspec.bench.markdown import as_markdown
from dynaspec.bench.progress import stages
from dynaspec.bench.provenance import provenance
from dynaspec.bench.report import SCHEMA, make_folder, write_json
from dynaspec.bench.tables import SECTIONS, TableOptions
from dynaspec.cli.console import print_error
from dynaspec.contract.errors import DynaspecError

QUICK: dict[str, Any] = {
    "loads": (1, 8), "rounds": 1, "window_tokens": 64, "thresholds": (0.4, 0.6), "longest": (10,), "gates": (0.0, 0.5),
}  # fmt: skip


def main() -> None:
    args = _arguments()
    try:
        make_folder(args.output_dir)
        options = TableOptions(args.model, args.draft_model, _data(args), **(QUICK if args.quick else {}))
        with stages() as tell:
            tables = {name: SECTIONS[name](options, tell) for name in args.sections}
        document = {"schema": SCHEMA, "provenance": provenance(), "tables": tables}
        write_json(args.output_dir / "seed_tables.json", document)
        text = "\n".join(f"## {name}\n\n{as_markdown(rows)}" for name, rows in tables.items())
        (args.output_dir / "seed_tables.md").write_text(text, encoding="utf-8")
    except DynaspecError as error:
        print_error(str(error))
        sys.exit(2)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/models/target", help="the target's checkpoint folder")
    parser.add_argument("--draft-model", default="tests/models/draft", help="the drafter's checkpoint folder")
    parser.add_argument("--dataset", type=Path, help="file of the prompts that are decoded (default: maths)")
    parser.add_argument("--other-dataset", type=Path, help="file of other prompts to take a profile on (default: code)")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="tables to make")
    parser.add_argument("--quick", action="store_true", help="small grids, one round")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for Markdown and figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
