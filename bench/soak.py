"""A server under unruly callers: every answer is checked, and what it keeps is watched from outside.

Starts ``dynaspec serve`` on the loopback, short of KV memory so that requests are preempted, and keeps so many callers
at it: prompts, lengths and parameters at random, streamed or not, read to the end, read slowly, left or cancelled, with
requests among them that must be refused. Greedy and seeded answers must be those of single runs of plain decoding, and
parts of answers their beginnings. When everyone has gone, nothing may run and no KV block be held; from the third
minute on memory may not grow by 1 MB a minute. Exits with 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import dynaspec  # first: it sets what torch's threads read when they start

# isort: split
import aiohttp
from rich.console import Console

from dynaspec.bench.policies import parse_policy
from dynaspec.bench.provenance import provenance
from dynaspec.bench.report import make_folder, write_json
from dynaspec.bench.serving.launch import HOST, free_port, launched, serve_command
from dynaspec.bench.soak.calls import draw_calls
from dynaspec.bench.soak.client import Caller
from dynaspec.bench.soak.drive import drive
from dynaspec.bench.soak.report import Soak, as_table, plot
from dynaspec.bench.soak.watch import Watch, until_idle
from dynaspec.bench.soak.wishes import Choice, Wish, draw_wishes, known_answer
from dynaspec.cli.console import print_error
from dynaspec.contract.errors import DynaspecError

READY_S = 180.0
IDLE_S = 60.0
"""What the server gets to notice that everyone has gone."""
LOOK_S = 1.0
PATIENCE_S = 4.0


def single_runs(args: argparse.Namespace) -> tuple[list[Wish], list[list[Choice]]]:
    """Wishes, and what each gets when nobody else is there and nothing is drafted."""
    llm = dynaspec.LLM(args.model, max_num_seqs=1, enable_prefix_caching=False)
    try:
        longest = min(args.longest_prompt, llm.max_model_len - args.most_tokens)
        wishes = draw_wishes(
            args.wishes,
            vocab_size=llm.tokenizer.vocab_size,
            longest_prompt=longest,
            most_tokens=args.most_tokens,
            seed=args.seed,
        )
        return wishes, [known_answer(llm.generate([list(wish.prompt)], wish.params)[0]) for wish in wishes]
    finally:
        llm.close()


async def soak(args: argparse.Namespace, wishes: Sequence[Wish], known: Sequence[Sequence[Choice]]) -> Soak:
    """Starts a server, drives it and stops it."""
    port = free_port()
    root = f"http://{HOST}:{port}"
    further = ["--max-num-seqs", str(args.max_num_seqs), "--kv-cache-memory", args.kv_cache_memory, "--no-access-log"]
    command = serve_command(args.model, parse_policy(args.policy, args.draft_model), port, further)
    async with (
        launched("the soak", command, root, args.output_dir / "server.log", READY_S) as process,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
        ) as session,
    ):
        watch = Watch(session, root, process.pid, LOOK_S)
        watching = asyncio.create_task(watch.run())
        began = time.monotonic()
        until = began + 60 * args.minutes
        calls = draw_calls(len(wishes), patience_s=PATIENCE_S, seed=args.seed)
        try:
            tally = await drive(
                Caller(session, root, wishes), calls, known, args.concurrency, lambda: time.monotonic() < until
            )
            seconds = time.monotonic() - began
            load = await until_idle(session, root, IDLE_S)
        finally:
            watching.cancel()
    return Soak(seconds, tally, watch.samples, load, -1 if process.returncode is None else process.returncode)


def main() -> None:
    args = _arguments()
    console = Console()
    try:
        make_folder(args.output_dir)
        console.print(f"decoding {args.wishes} requests one at a time, to know their answers")
        wishes, known = single_runs(args)
        console.print(f"{args.concurrency} callers for {args.minutes:g} minutes")
        found = asyncio.run(soak(args, wishes, known))
        title = f"{args.concurrency} unruly callers for {args.minutes:g} minutes, policy {args.policy}"
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        write_json(args.output_dir / "soak.json", {"provenance": provenance(), "options": options} | found.as_json())
        plot(found, args.output_dir / "soak.png", title)
    except DynaspecError as error:
        print_error(str(error))
        sys.exit(2)
    console.print(as_table(found))
    for problem in found.tally.problems:
        console.print(problem, markup=False, soft_wrap=True)
    sys.exit(0 if all(good for _, _, good in found.verdicts()) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tests/models/target", help="the target's checkpoint folder")
    parser.add_argument("--draft-model", default="tests/models/draft", help="the drafter's checkpoint folder")
    parser.add_argument("--policy", default="auto", help="as in dynaspec bench (auto)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--concurrency", type=int, default=64, help="callers at once (64)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="of the server (32)")
    parser.add_argument("--kv-cache-memory", default="24M", help="of the server (24M)")
    parser.add_argument("--wishes", type=int, default=64, help="different requests (64)")
    parser.add_argument("--longest-prompt", type=int, default=200, help="tokens (200)")
    parser.add_argument("--most-tokens", type=int, default=96, help="of an answer (96)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (0)")
    parser.add_argument("--output-dir", type=Path, default=Path("out/soak"), help="for what is found (out/soak)")
    args = parser.parse_args()
    if args.minutes <= 0 or min(args.concurrency, args.wishes, args.longest_prompt, args.most_tokens) < 1:
        parser.error("a number is too small; expected --minutes above 0 and the others at least 1")
    return args


if __name__ == "__main__":
    main()
