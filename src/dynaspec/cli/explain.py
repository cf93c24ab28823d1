"""``dynaspec explain``: why draft lengths were chosen as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynaspec.cli.console import note, status


def explain(
    file: Annotated[Path, typer.Argument(help="A decision log, as --decision-log writes it.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The report: one HTML file.")] = Path("report.html"),
) -> None:
    """Make a report of a decision log: what was decided, why, how it did, and what else could have been done."""
    with status(f"reading {file}"):
        from dynaspec.explain.report import analyse, write_report

        analysis = analyse(file)
        write_report(analysis, output, f"Decisions in {file.name}")
    for line in analysis.summary:
        typer.echo(line)
    note(f"written to {output}")
