"""How long a server takes to be ready on a machine where nothing is compiled yet, what its first requests wait for, and
how long the next start takes.

Each start is ``dynaspec serve --demo`` in a process of its own, on the loopback, with an empty folder for compiled
kernels; then one request that is sampled, and the same again; then the server is started again with what is in the
folder. ``--against`` names another copy of the sources, of an earlier version say; the two take turns. Shown are
medians over the rounds. Nothing else should run: on two cores a start uses both.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import dynaspec
from dynaspec.bench.provenance import provenance
from dynaspec.bench.serving.client import send
from dynaspec.bench.serving.server import Server, ServerError, Target, connect
from dynaspec.bench.serving.sweep import HOST, free_port, launched
from dynaspec.contract.errors import ConfigError
from dynaspec.result_output import make_folder, write_json
from study import errors_told

LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds."""

    ready_s: float
    """From the command to the first answer."""
    first_s: float
    """Of the first request."""
    second_s: float
    """Of the same request again."""
    later_s: float
    """As ``ready_s``, of the next start, for which all is compiled."""


async def start(sources: Path) -> Start:
    """One start with nothing compiled, and the next one.

    Args:
        sources: the folder that has the package ``dynaspec``.

    Raises:
        ServerError: the server ended, was not ready in time, or a request failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready_s, first_s, second_s = await _serve(sources, Path(folder))
        later_s, *_ = await _serve(sources, Path(folder))
    return Start(ready_s, first_s, second_s, later_s)


async def _serve(sources: Path, kernels: Path) -> tuple[float, float, float]:
    """Seconds until the server is ready, and of two requests."""
    port = free_port()
    root = f"http://{HOST}:{port}"
    serve = [sys.executable, "-m", "dynaspec", "serve", "--demo", "--host", HOST, "--port", str(port)]
    command = ["env", f"NUMBA_CACHE_DIR={kernels}", f"PYTHONPATH={sources}", *serve]
    began = time.perf_counter()
    async with launched(str(sources), command, root, kernels / "log", LONGEST_S):
        ready_s = time.perf_counter() - began
        async with connect(Target(root=root)) as server:
            return ready_s, await _request_s(server), await _request_s(server)


async def _request_s(server: Server) -> float:
    body = {"model": "demo", "prompt": "The sea is", "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": 1}
    began = time.perf_counter()
    record = await send(server.session, server.target.url, server.target.api, body, {})
    if record.failure is not None:
        raise ServerError(f"a request failed: {record.failure.kind}: {record.failure.message}")
    return time.perf_counter() - began


def as_table(found: dict[str, list[Start]]) -> Table:
    names = ("ready, s", "first request, s", "the same again, s", "next start ready, s")
    table = Table("sources", *names, title="First start, medians")
    for name, starts in found.items():
        columns = zip(*map(astuple, starts), strict=True)
        table.add_row(name, *(f"{median(column):.2f}" for column in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another version, to take turns with")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for the figures")
    args = parser.parse_args()
    sides = {"these": Path(dynaspec.__file__).parents[1]}
    with errors_told():
        if args.against is not None:
            sides[str(args.against)] = (args.against / "src").resolve()
            if not (sides[str(args.against)] / "dynaspec").is_dir():
                raise ConfigError(f"--against is {args.against}; expected a checkout, with a folder src/dynaspec")
        make_folder(args.output_dir)
        found: dict[str, list[Start]] = {name: [] for name in sides}
        for number in range(args.rounds):
            for name, sources in sides.items():
                found[name].append(asyncio.run(start(sources)))
            print(f"round {number + 1} of {args.rounds} is done", file=sys.stderr, flush=True)
        seconds = {name: [asdict(one) for one in starts] for name, starts in found.items()}
        write_json(args.output_dir / "first_start.json", {"provenance": provenance(), "starts": seconds})
    Console(highlight=False).print(as_table(found))


if __name__ == "__main__":
    main()
