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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dynaspec.engine  # first: it says how PyTorch's threads wait

# isort: split
import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dynaspec.bench.provenance import provenance
from dynaspec.bench.serving.sweep import HOST, free_port, launched, serve_command
from dynaspec.contract.errors import DynaspecError
from dynaspec.control.policies.short_names import parse_policy
from dynaspec.pictures import BLUE, GOLD, GREY, RED, new_figure, save_png, tidy
from dynaspec.result_output import make_folder, write_json
from soak_callers import Caller, Choice, RequestSpec, Tally, draw_calls, draw_requests, drive, known_answer
from study import errors_told, pair_parser

_NAMES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass(frozen=True, slots=True)
class Load:
    """What a server is busy with."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV blocks that running requests hold."""

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.kv_usage)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look."""

    at_s: float
    """Since the watch began."""
    memory_mb: float
    """Resident; 1 MB = 10⁶ bytes."""
    load: Load


async def read_load(session: aiohttp.ClientSession, url: str) -> Load:
    """
    Raises:
        DynaspecError: the metrics are not those of a dynaspec server.
    """
    async with session.get(url + "/metrics") as response:
        page = await response.text()
    found = {
        name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if (name := sample.name.partition(":")[2]) in _NAMES
    }
    if len(found) < len(_NAMES):
        raise DynaspecError(f"{url}/metrics has {sorted(found)}; expected {', '.join(_NAMES)}")
    return Load(int(found[_NAMES[0]]), int(found[_NAMES[1]]), found[_NAMES[2]])


def resident_mb(pid: int) -> float:
    """What a process keeps in memory, from Linux's /proc.

    Raises:
        OSError: there is no such process, or no /proc.
    """
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024 / 1e6


class Watch:
    """Looks at a server every so often, until its task is cancelled."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int, every_s: float) -> None:
        self.samples: list[Sample] = []
        self._session = session
        self._url = url
        self._pid = pid
        self._every_s = every_s

    async def run(self) -> None:
        began = time.monotonic()
        while True:
            load = await read_load(self._session, self._url)
            self.samples.append(Sample(time.monotonic() - began, resident_mb(self._pid), load))
            await asyncio.sleep(self._every_s)


async def until_idle(session: aiohttp.ClientSession, url: str, timeout_s: float) -> Load:
    """Waits until a server has nothing to do; its load at last, whether or not that is nothing."""
    until = time.monotonic() + timeout_s
    while not (load := await read_load(session, url)).idle and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return load


def growth_mb_per_min(samples: Sequence[Sample], from_s: float) -> float | None:
    """Slope of the memory, by least squares over the samples from a time on; None with fewer than two of them."""
    later = [sample for sample in samples if sample.at_s >= from_s]
    if len(later) < 2:
        return None
    slope, _ = np.polyfit([sample.at_s / 60 for sample in later], [sample.memory_mb for sample in later], 1)
    return float(slope)


WARM_UP_S = 120.0
"""Until then memory may grow: caches fill and code is compiled."""
MOST_MB_PER_MIN = 1.0
_LEAST_MB = 10.0
"""Shown above and below, so that a memory that stays does not look as if it moved."""


@dataclass(frozen=True, slots=True)
class Soak:
    """What a soak found."""

    seconds: float
    tally: Tally
    samples: Sequence[Sample]
    load_after: Load
    """When everyone had gone."""
    exit_code: int
    """Of the server, when it was asked to stop."""

    @property
    def growth_mb_per_min(self) -> float | None:
        """After the warm-up; None if the soak was too short to say."""
        return growth_mb_per_min(self.samples, WARM_UP_S)

    def verdicts(self) -> list[tuple[str, str, bool]]:
        """(what was checked, what was found, whether that is right)."""
        tally, growth = self.tally, self.growth_mb_per_min
        load = self.load_after
        checks = [
            ("calls answered as they should be", f"{tally.calls - tally.failed} of {tally.calls}", tally.failed == 0),
            (
                "left when everyone has gone",
                f"{load.running} running, {load.waiting} waiting, {100 * load.kv_usage:g} % of KV blocks",
                load.idle,
            ),
            ("server's exit code", str(self.exit_code), self.exit_code == 0),
        ]
        if growth is not None:
            checks.append(("memory after two minutes", f"{growth:+.2f} MB a minute", growth < MOST_MB_PER_MIN))
        return checks

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "seconds": self.seconds,
            "calls": tally.calls,
            "ends": dict(tally.ends),
            "tokens": tally.tokens,
            "wrong": tally.wrong,
            "problems": tally.problems,
            "load_after": asdict(self.load_after),
            "exit_code": self.exit_code,
            "growth_mb_per_min": self.growth_mb_per_min,
            "passed": all(good for _, _, good in self.verdicts()),
            "samples": [asdict(sample) for sample in self.samples],
        }


def as_table(soak: Soak) -> Table:
    """What was done, and the verdicts."""
    tally = soak.tally
    table = Table(box=SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("calls", f"{tally.calls} in {soak.seconds:.0f} s, {tally.calls / soak.seconds:.1f} a second", "")
    table.add_row("how they ended", ", ".join(f"{count} {end}" for end, count in tally.ends.most_common()), "")
    table.add_row("tokens received", f"{tally.tokens}, {tally.tokens / soak.seconds:.0f} a second", "")
    if soak.samples:
        memory = [sample.memory_mb for sample in soak.samples]
        table.add_row("memory", f"{memory[0]:.0f} MB at first, {max(memory):.0f} at most, {memory[-1]:.0f} at last", "")
    for what, found, good in soak.verdicts():
        table.add_row(what, found, "[green]good[/]" if good else "[bold red]BAD[/]")
    return table


def plot(soak: Soak, path: Path, title: str) -> None:
    """Writes a PNG: memory and load over time.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(10, 6.4, title)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    minutes = np.array([sample.at_s / 60 for sample in soak.samples])
    memory = np.array([sample.memory_mb for sample in soak.samples])
    upper.plot(minutes, memory, color=BLUE, linewidth=1.6)
    upper.set_ylim(memory.min() - _LEAST_MB, memory.max() + _LEAST_MB)
    growth, warm = soak.growth_mb_per_min, minutes >= WARM_UP_S / 60
    if growth is not None:
        fitted = memory[warm].mean() + growth * (minutes[warm] - minutes[warm].mean())
        label = f"{growth:+.2f} MB a minute"
        upper.plot(minutes[warm], fitted, color=RED, linewidth=1.2, linestyle="--", label=label)
        upper.legend(frameon=False, fontsize=9, loc="lower right")
    tidy(upper, "Memory of the server's process", "", "MB")
    lower.plot(minutes, [s.load.running for s in soak.samples], color=BLUE, linewidth=1.2, label="running")
    lower.plot(minutes, [s.load.waiting for s in soak.samples], color=GOLD, linewidth=1.2, label="waiting")
    usage = lower.twinx()
    usage.plot(minutes, [100 * s.load.kv_usage for s in soak.samples], color=GREY, linewidth=0.8)
    usage.set_ylim(0, 105)
    lower.set_ylim(bottom=0)
    tidy(lower, "Requests, and KV blocks in use (grey)", "minutes", "requests")
    tidy(usage, "", "", "% of KV blocks")
    usage.grid(visible=False)
    lower.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    save_png(figure, path)


READY_S = 180.0
IDLE_S = 60.0
"""What the server gets to notice that everyone has gone."""
LOOK_S = 1.0
LEAVE_AFTER_S = 4.0


def single_runs(args: argparse.Namespace) -> tuple[list[RequestSpec], list[list[Choice]]]:
    """Requests, and what each gets when nobody else is there and nothing is drafted."""
    llm = dynaspec.LLM(args.model, max_num_seqs=1, enable_prefix_caching=False)
    try:
        longest = min(args.longest_prompt, llm.max_model_len - args.most_tokens)
        requests = draw_requests(
            args.requests,
            vocab_size=llm.tokenizer.vocab_size,
            longest_prompt=longest,
            most_tokens=args.most_tokens,
            seed=args.seed,
        )
        return requests, [known_answer(llm.generate([list(request.prompt)], request.params)[0]) for request in requests]
    finally:
        llm.close()


async def soak(args: argparse.Namespace, requests: Sequence[RequestSpec], known: Sequence[Sequence[Choice]]) -> Soak:
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
        calls = draw_calls(len(requests), leave_after_s=LEAVE_AFTER_S, seed=args.seed)
        try:
            tally = await drive(
                Caller(session, root, requests), calls, known, args.concurrency, lambda: time.monotonic() < until
            )
            seconds = time.monotonic() - began
            load = await until_idle(session, root, IDLE_S)
        finally:
            watching.cancel()
    return Soak(seconds, tally, watch.samples, load, -1 if process.returncode is None else process.returncode)


def main() -> None:
    args = _arguments()
    console = Console()
    with errors_told():
        make_folder(args.output_dir)
        console.print(f"decoding {args.requests} requests one at a time, to know their answers")
        requests, known = single_runs(args)
        console.print(f"{args.concurrency} callers for {args.minutes:g} minutes")
        found = asyncio.run(soak(args, requests, known))
        title = f"{args.concurrency} unruly callers for {args.minutes:g} minutes, policy {args.policy}"
        write_json(args.output_dir / "soak.json", {"provenance": provenance(), "options": vars(args)} | found.as_json())
        plot(found, args.output_dir / "soak.png", title)
    console.print(as_table(found))
    for problem in found.tally.problems:
        console.print(problem, markup=False, soft_wrap=True)
    sys.exit(0 if all(good for _, _, good in found.verdicts()) else 1)


def _arguments() -> argparse.Namespace:
    parser = pair_parser(__doc__)
    parser.add_argument("--policy", default="auto", help="as in dynaspec bench (auto)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--concurrency", type=int, default=64, help="callers at once (64)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="of the server (32)")
    parser.add_argument("--kv-cache-memory", default="24M", help="of the server (24M)")
    parser.add_argument("--requests", type=int, default=64, help="different requests (64)")
    parser.add_argument("--longest-prompt", type=int, default=200, help="tokens (200)")
    parser.add_argument("--most-tokens", type=int, default=96, help="of an answer (96)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (0)")
    parser.add_argument("--output-dir", type=Path, default=Path("out/soak"), help="for what is found (out/soak)")
    args = parser.parse_args()
    if args.minutes <= 0 or min(args.concurrency, args.requests, args.longest_prompt, args.most_tokens) < 1:
        parser.error("a number is too small; expected --minutes above 0 and the others at least 1")
    return args


if __name__ == "__main__":
    main()
