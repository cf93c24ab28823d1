"""Products on CPU by the form of the weights and the arithmetic, in the sizes of a small model.

Each turn multiplies by as many different weights as are needed to come from memory, or by one that stays in the caches;
the forms take turns, and the fastest turn of each counts. Prints microseconds a product, and how many times as fast as
bfloat16 weights in float32 arithmetic each is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from dynaspec.model.kernels import gemm, integer_blocks
from dynaspec.model.kernels.team import team_size
from dynaspec.model.packed import PackedLinear

SIZES = ((576, 1536, 1), (576, 1536, 192), (1536, 576, 192), (576, 49152, 6))
"""Inputs, outputs, and how many matrices take turns: those of SmolLM2-135M, in the caches and beyond."""
ROWS = (1, 4, 8, 16, 32)
FORMS = {
    "bfloat16": (None, gemm.FLOAT32),
    "int8": (integer_blocks.quantise_int8, gemm.FLOAT32),
    "int4": (integer_blocks.quantise_int4, gemm.FLOAT32),
    "bfloat16 products": (None, gemm.best_arithmetic()),
}
"""What quantises the weights, and the arithmetic."""


def layers(inputs: int, outputs: int, count: int, form: str, threads: int) -> list[PackedLinear]:
    weights = (torch.randn(outputs, inputs).bfloat16().float() for _ in range(count))
    quantise, arithmetic = FORMS[form]
    if quantise is not None:
        weights = (torch.from_numpy(quantise(weight.numpy())) for weight in weights)
    return [PackedLinear(weight, None, threads, arithmetic) for weight in weights]


def fastest(stacks: Sequence[Sequence[PackedLinear]], x: torch.Tensor, turns: int) -> list[float]:
    """Seconds of one product for each stack, which alternate."""
    best = [float("inf")] * len(stacks)
    for _ in range(turns):
        for which, stack in enumerate(stacks):
            repeats = max(1, 20 // len(stack))
            started = time.perf_counter()
            for _ in range(repeats):
                for layer in stack:
                    layer(x)
            best[which] = min(best[which], (time.perf_counter() - started) / repeats / len(stack))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="turns of each form (15)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows (1 to 32)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (PyTorch's)")
    options = parser.parse_args()
    threads = team_size(options.threads)
    for inputs, outputs, count in SIZES:
        stacks = [layers(inputs, outputs, count, form, threads) for form in FORMS]
        table = Table(title=f"{inputs} inputs, {outputs} outputs, {count} matrices, {threads} threads")
        for heading in ("rows", *(f"{form} µs" for form in FORMS), *(f"{form} times" for form in list(FORMS)[1:])):
            table.add_column(heading, justify="right")
        for rows in options.rows:
            found = fastest(stacks, torch.randn(rows, inputs), options.turns)
            times = (f"{found[0] / seconds:.2f}" for seconds in found[1:])
            table.add_row(str(rows), *(f"{seconds * 1e6:.1f}" for seconds in found), *times)
        Console().print(table)


if __name__ == "__main__":
    main()
