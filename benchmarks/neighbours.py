"""How decoding fares beside others on the same cores: alone, beside busy processes, and beside a second engine.

With ``--control-group``, also how an engine fares in that group, whose time is limited, beside one with one thread.

Turns alternate, a round at a time. Prints tokens/s and shares; writes neighbours.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import dynaspec.engine  # first: it says how PyTorch's threads wait

# isort: split
from rich.table import Table

from dynaspec.bench.datasets import demo_prompts, spread
from dynaspec.bench.provenance import provenance
from dynaspec.cli.console import result_console
from dynaspec.cli.demo import demo_target
from dynaspec.contract.errors import DynaspecError
from dynaspec.result_output import make_folder, write_json
from study import errors_told

BUSY = "while True: pass"
ALONE, BESIDE, TWO = "alone", "beside a busy process", "two engines, together"
ONE_THREAD, LIMITED = "one thread", "in the control group"


class Engine:
    """An engine in a process of its own, which decodes when it is told."""

    def __init__(self, model: str, tokens: int, threads: int | None = None, group: Path | None = None) -> None:
        """
        Args:
            threads: None = as many as by default.
            group: folder of the control group that it joins before it starts.
        """
        command = [sys.executable, __file__, "--serve", model, "--tokens", str(tokens)]
        if group is not None:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        variables = dict(os.environ) if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self.begin(1)
        self.end()

    def begin(self, requests: int) -> None:
        """Starts to decode so many requests at once."""
        print(requests, file=self._process.stdin, flush=True)

    def end(self) -> float:
        """Waits until it has; tokens per second.

        Raises:
            DynaspecError: the process has ended.
        """
        line = "" if self._process.stdout is None else self._process.stdout.readline()
        if not line:
            raise DynaspecError(f"an engine's process ended with exit status {self._process.wait()}; see above")
        return float(line)

    def rate(self, requests: int) -> float:
        self.begin(requests)
        return self.end()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(model: str, tokens: int) -> None:
    """What an ``Engine``'s process does."""
    llm = dynaspec.LLM(model, max_model_len=1024, max_num_seqs=8, enable_prefix_caching=False)
    prompts = [prompt.text for prompt in spread(demo_prompts(), 8)]
    params = dynaspec.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for line in sys.stdin:
        requests, began = int(line), time.perf_counter()
        done = llm.generate(prompts[:requests], params)
        print(sum(len(o.outputs[0].token_ids) for o in done) / (time.perf_counter() - began), flush=True)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that only compute, for a while."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


Found = dict[int, dict[str, list[float]]]
"""Load → side → tokens/s of each round."""


def measure(
    model: str, loads: list[int], rounds: int, neighbours: int, tokens: int, group: Path | None = None
) -> Found:
    found: Found = {load: {ALONE: [], BESIDE: [], TWO: []} for load in loads}
    engines = [Engine(model, tokens), Engine(model, tokens)]
    limited = {}
    if group is not None:
        limited = {ONE_THREAD: Engine(model, tokens, threads=1), LIMITED: Engine(model, tokens, group=group)}
    try:
        for number in range(rounds):
            for load, sides in found.items():
                for side, engine in limited.items():
                    sides.setdefault(side, []).append(engine.rate(load))
                sides[ALONE].append(engines[0].rate(load))
                with busy(neighbours):
                    sides[BESIDE].append(engines[0].rate(load))
                for engine in engines:
                    engine.begin(load)
                sides[TWO].append(sum(engine.end() for engine in engines))
            print(f"round {number + 1} of {rounds} is done", file=sys.stderr, flush=True)
    finally:
        for engine in (*engines, *limited.values()):
            engine.close()
    return found


def as_table(found: Found) -> Table:
    shown = [(BESIDE, ALONE, "of alone"), (TWO, ALONE, "of alone")]
    if any(LIMITED in sides for sides in found.values()):
        shown.append((LIMITED, ONE_THREAD, "of one thread"))
    table = Table("requests at once", ALONE, *(name for side, _, share in shown for name in (side, share)))
    for load, sides in found.items():
        row = [f"{median(sides[ALONE]):.1f}"]
        for side, base, _ in shown:
            share = median(b / a for a, b in zip(sides[base], sides[side], strict=True))
            row += [f"{median(sides[side]):.1f}", f"{share:.2f}"]
        table.add_row(str(load), *row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the target (that of the demonstration)")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 8], help="requests at once (1 8)")
    parser.add_argument("--rounds", type=int, default=7, help="(7)")
    parser.add_argument("--neighbours", type=int, default=1, help="busy processes (1)")
    parser.add_argument(
        "--control-group",
        type=Path,
        help="folder of a control group with limited CPU time that this user may move processes to",
    )
    parser.add_argument("--tokens", type=int, default=48, help="of each request (48)")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for the figures")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        with errors_told():
            serve(args.serve, args.tokens)
        return
    group = args.control_group
    if group is not None and not os.access(group / "cgroup.procs", os.W_OK):
        parser.error(f"--control-group is {group}; expected a folder whose cgroup.procs can be written")
    with errors_told():
        make_folder(args.output_dir)
        found = measure(args.model or demo_target(), args.loads, args.rounds, args.neighbours, args.tokens, group)
        write_json(args.output_dir / "neighbours.json", {"provenance": provenance(), "tokens_per_second": found})
    result_console(160).print(as_table(found))


if __name__ == "__main__":
    main()
