"""``dynaspec bench compare``: results side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaspec.cli.bench_console import result_console
from dynaspec.cli.console import note


def compare(
    files: Annotated[list[Path], typer.Argument(help="Results of bench serve, or of bench offline.", metavar="FILES…")],
) -> None:
    """Compare results: every figure of each, and its ratio to the first one's.

    Results of vllm bench serve can be compared too. Says in which settings the results differ.
    """
    from dynaspec.bench.serving.compare import as_table, load_results, warnings
    from dynaspec.bench.serving.compare import compare as compare_results

    comparison = compare_results(load_results(files))
    result_console().print(as_table(comparison))
    for warning in warnings(comparison):
        note(f"note: {warning}")
