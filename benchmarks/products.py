"""Matrix products on CPU by rows: the engine's, whose bits do not depend on the rows beside them, against PyTorch's.

Each turn multiplies by as many different weights as a small model holds, so that they come from where they would in a
pass. Both sides take turns. Prints GFLOP/s and their ratio; a product that is slow at some rows shows as a dent.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from dynaspec.model.kernels.team import team_size
from dynaspec.model.packed import PackedLinear

SHAPES = ((512, 512), (512, 2816), (1408, 512))
"""Inputs and outputs of the demo target's matrices."""
ROWS = (*range(1, 34), 48, 64, 128)
MATRICES = 12


def seconds(turn: Callable[[], None]) -> float:
    started = time.perf_counter()
    turn()
    return (time.perf_counter() - started) / MATRICES


def measure(inputs: int, outputs: int, rows: int, turns: int, threads: int) -> tuple[float, float]:
    """Median seconds of one product, ours and PyTorch's in float32."""
    weights = [torch.randn(outputs, inputs).bfloat16().float() for _ in range(MATRICES)]
    ours = [PackedLinear(weight, None, threads) for weight in weights]
    x = torch.randn(rows, inputs)

    def multiply() -> None:
        for layer in ours:
            layer(x)

    def rival() -> None:
        for weight in weights:
            F.linear(x, weight)

    pairs = [(seconds(multiply), seconds(rival)) for _ in range(turns + 1)][1:]
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="turns of each side (15)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows (1 to 33, 48, 64, 128)")
    options = parser.parse_args()
    threads = team_size(torch.get_num_threads())
    for inputs, outputs in SHAPES:
        table = Table(title=f"{inputs} inputs, {outputs} outputs, {threads} threads")
        for heading in ("rows", "µs", "GFLOP/s", "PyTorch's", "ours / PyTorch's"):
            table.add_column(heading, justify="right")
        for rows in options.rows:
            own, other = measure(inputs, outputs, rows, options.turns, threads)
            work = 2e-9 * rows * inputs * outputs
            table.add_row(
                str(rows), f"{own * 1e6:.0f}", f"{work / own:.0f}", f"{work / other:.0f}", f"{other / own:.2f}"
            )
        Console().print(table)


if __name__ == "__main__":
    main()
