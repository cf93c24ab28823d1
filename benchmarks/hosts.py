"""dynaspec's controllers in other engines: vLLM and Transformers, each against itself.

vllm          its own scheduler (plain, fixed draft lengths) and dynaspec's, at several loads and over a workload that
              changes; dynaspec's where it never drafts, too: what a drafter costs by being there. Needs an environment
              with vLLM and dynaspec: `make test-hosts` makes .venv-vllm
transformers  plain generate, Transformers' assisted generation, and dynaspec's generate

The sides alternate; the best rival is picked on odd rounds and compared on even ones.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import dynaspec.engine  # noqa: F401  # first: it says how PyTorch's threads wait

# isort: split
from rich.console import Console

import hosts_transformers
import hosts_vllm
from dynaspec.bench.datasets import demo_prompts
from dynaspec.bench.provenance import provenance
from dynaspec.cli.console import result_console
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.result_output import Tell, make_folder, stages, write_json
from hosts_vllm import workloads
from study import errors_told, pair_parser
from transformers_side import ASSISTED

HOSTS = ("transformers", "vllm")
VLLM_PYTHON = Path(".venv-vllm/bin/python")


def main() -> None:
    args = _arguments()
    console = result_console(160)
    with errors_told():
        make_folder(args.output_dir)
        with stages() as tell:
            if "transformers" in args.hosts:
                on_transformers(args, console, tell)
            if "vllm" in args.hosts:
                on_vllm(args, console, tell)


def on_transformers(args: argparse.Namespace, console: Console, tell: Tell) -> None:
    options = hosts_transformers.Options(rounds=2, max_tokens=48) if args.quick else hosts_transformers.Options()
    models = (Path(args.model), Path(args.draft_model))
    result = hosts_transformers.run(models, demo_prompts(), options, tell)
    document = {"provenance": provenance(), "options": asdict(options)} | result.as_document()
    write_json(args.output_dir / "hosts_transformers.json", document)
    console.print(f"Transformers {result.version}, one request at a time: tokens/s, and dynaspec's speed over it")
    for side, rates in result.rates.items():
        middle, bound = result.ratio(side)
        different = f"; {result.different[side]} outputs differ from plain decoding's" if result.different[side] else ""
        console.print(f"  {side:<18} {median(rates):6.1f}   {middle:.3f} (≥ {bound:.3f}){different}")
    wanted = hosts_transformers.WANTED
    reached = result.ratio(ASSISTED)[0] >= wanted
    console.print(f"wanted: {wanted} of its assisted generation: {'reached' if reached else 'missed'}")


def on_vllm(args: argparse.Namespace, console: Console, tell: Tell) -> None:
    if not args.vllm_python.exists():
        raise ConfigError(f"there is no {args.vllm_python}; expected vLLM's environment, which make test-hosts makes")
    chosen: dict[str, Any] = {"rounds": 2, "fixed": (1, 3, 6), "loads": (1, 4)} if args.quick else {}
    options = hosts_vllm.Options(**chosen | ({} if args.rounds is None else {"rounds": args.rounds}))
    tokenizer = Tokenizer(args.model)
    prompts = [(prompt, tokenizer.encode(prompt.text)) for prompt in demo_prompts()]
    loads = workloads(prompts, options.loads, options.max_tokens)
    if args.workloads is not None:
        unknown = [name for name in args.workloads if name not in loads]
        if unknown:
            raise ConfigError(f"--workloads has {unknown}; expected some of {list(loads)}")
        loads = {name: loads[name] for name in args.workloads}
    models = (Path(args.model), Path(args.draft_model))
    result = hosts_vllm.run(args.vllm_python, models, loads, options, args.output_dir, tell)
    write_json(args.output_dir / "hosts_vllm.json", hosts_vllm.as_document(result, asdict(options)))
    console.print(hosts_vllm.as_table(result))
    console.print(hosts_vllm.verdict(result), soft_wrap=True)


def _arguments() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--hosts", nargs="+", choices=HOSTS, default=HOSTS, help="what to run (both)")
    parser.add_argument(
        "--vllm-python", type=Path, default=VLLM_PYTHON, help=f"interpreter that has vLLM ({VLLM_PYTHON})"
    )
    parser.add_argument("--quick", action="store_true", help="fewer loads, lengths and rounds")
    parser.add_argument("--workloads", nargs="+", help="of vLLM's, those to run: loads, or shift (all)")
    parser.add_argument("--rounds", type=int, help="of vLLM's sides that count (11)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("bench-out"), help="folder for figures and engines' logs"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
