"""How long a server takes to be ready on a machine where nothing is compiled yet, and what its first requests wait for.

Each start is ``dynaspec serve --demo`` in a process of its own, on the loopback, with an empty folder for compiled
kernels; then one request that is sampled, and the same again. ``--against`` names another copy of the sources, of an
earlier version say; the two take turns. Shown are medians over the rounds. Nothing else should run: on two cores a
start uses both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import dynaspec
from dynaspec.bench.offline import make_folder, write_json
from dynaspec.bench.provenance import provenance
from dynaspec.bench.serving.sweep import HOST, free_port
from dynaspec.cli.console import print_error
from dynaspec.contract.errors import ConfigError, DynaspecError

LONGEST_S = 600.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds."""

    ready_s: float
    """From the command to the first answer of ``/health``."""
    first_s: float
    """Of the first request."""
    second_s: float
    """Of the same request again."""


def start(sources: Path) -> Start:
    """One start with nothing compiled.

    Args:
        sources: the folder that has the package ``dynaspec``.

    Raises:
        ConfigError: the server ended, or was not ready in time.
    """
    port = free_port()
    root = f"http://{HOST}:{port}"
    command = [sys.executable, "-m", "dynaspec.cli.main", "serve", "--demo", "--host", HOST, "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder, "PYTHONPATH": str(sources)}
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            while not _ready(root):
                if process.poll() is not None or time.perf_counter() - began > LONGEST_S:
                    log.seek(0)
                    raise ConfigError(f"the server of {sources} did not become ready: {log.read().strip()[-300:]}")
                time.sleep(_LOOK_S)
            ready_s = time.perf_counter() - began
            return Start(ready_s, _request_s(root), _request_s(root))
        finally:
            process.terminate()
            process.wait()


def _ready(root: str) -> bool:
    try:
        with urllib.request.urlopen(f"{root}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _request_s(root: str) -> float:
    body = {"model": "demo", "prompt": "The sea is", "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": 1}
    headers = {"Content-Type": "application/json"}
    began = time.perf_counter()
    request = urllib.request.Request(f"{root}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LONGEST_S) as answer:
        answer.read()
    return time.perf_counter() - began


def as_table(found: dict[str, list[Start]]) -> Table:
    table = Table("sources", "ready, s", "first request, s", "the same again, s", title="First start, medians")
    for name, starts in found.items():
        columns = ([one.ready_s for one in starts], [one.first_s for one in starts], [one.second_s for one in starts])
        table.add_row(name, *(f"{median(column):.2f}" for column in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout of another version, to take turns with")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--output-dir", type=Path, default=Path("bench-out"), help="folder for the figures")
    args = parser.parse_args()
    sides = {"these": Path(dynaspec.__file__).parents[1]}
    try:
        if args.against is not None:
            sides[str(args.against)] = (args.against / "src").resolve()
            if not (sides[str(args.against)] / "dynaspec").is_dir():
                raise ConfigError(f"--against is {args.against}; expected a checkout, with a folder src/dynaspec")
        make_folder(args.output_dir)
        found: dict[str, list[Start]] = {name: [] for name in sides}
        for number in range(args.rounds):
            for name, sources in sides.items():
                found[name].append(start(sources))
            print(f"round {number + 1} of {args.rounds} is done", file=sys.stderr, flush=True)
        seconds = {name: [asdict(one) for one in starts] for name, starts in found.items()}
        write_json(args.output_dir / "first_start.json", {"provenance": provenance(), "starts": seconds})
    except DynaspecError as error:
        print_error(str(error))
        sys.exit(2)
    Console(highlight=False).print(as_table(found))


if __name__ == "__main__":
    main()
