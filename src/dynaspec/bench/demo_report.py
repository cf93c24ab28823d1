"""The demonstration's figures as lines, a table and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynaspec.control.policies.short_names import PLAIN

from .demo import Measured, Summary, by_kind, name_of, summarise
from .provenance import provenance
from .report import SCHEMA


def speeds_line(measured: Measured) -> Text:
    """Tokens per second of every policy on one prompt, and whether the outputs are alike."""
    speeds = {policy: measured.tokens_per_second(policy) for policy in measured.runs}
    fastest = max(speeds, key=lambda policy: speeds[policy])
    line = Text("tokens/s: ", "dim")
    for policy, speed in speeds.items():
        style = "bold" if policy == fastest else "dim"
        line.append(f"{name_of(policy)} {speed:.0f}", style).append(" · " if policy != [*speeds][-1] else "   ", "dim")
    if measured.different:
        return line.append("outputs differ: " + ", ".join(measured.different), "bold red")
    return line.append("✓ identical", "green")


def summary_table(measured: Sequence[Measured]) -> Table:
    """A line for every way, over all prompts."""
    table = _table("Greedy decoding, one request at a time, all prompts", "\nway")
    for heading in ("\ntokens/s", "\n× plain", "tokens\n/ step", "accept.\nlength", "wasted\n/ token"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("\nidentical", justify="right", no_wrap=True)
    summaries = summarise(measured)
    fastest = _fastest(summaries)
    for policy, summary in summaries.items():
        table.add_row(name_of(policy), *_cells(policy, summary), style="bold green" if policy == fastest else "")
    return table


def kinds_table(measured: Sequence[Measured]) -> Table:
    """A line for every kind of prompt: plain decoding's speed, and how many times that the others had."""
    table = _table("By kind of prompt, × plain", "kind")
    for policy in measured[0].runs:
        heading = "plain, tokens/s" if policy == PLAIN else name_of(policy)
        table.add_column(heading, justify="right", no_wrap=True)
    for kind, summaries in by_kind(measured).items():
        fastest = _fastest(summaries)
        cells = [
            Text(
                f"{summary.tokens_per_second:.1f}" if policy == PLAIN else f"{summary.speedup:.2f}×",
                style="bold green" if policy == fastest else "",
            )
            for policy, summary in summaries.items()
        ]
        table.add_row(kind, *cells)
    return table


def verdict(measured: Sequence[Measured]) -> Text:
    """One sentence: all outputs are plain decoding's."""
    outputs = sum(len(runs) for m in measured for runs in m.runs.values())
    return Text(f"✓ All {outputs} outputs are token for token those of plain decoding.", style="green")


def as_document(measured: Sequence[Measured]) -> dict[str, Any]:
    """Everything measured, with its provenance, as JSON values."""
    return {
        "schema": SCHEMA,
        "provenance": provenance(),
        "identical": not any(m.different for m in measured),
        "by_kind": {
            kind: {policy: asdict(summary) for policy, summary in summaries.items()}
            for kind, summaries in by_kind(measured).items()
        },
        "all": {policy: asdict(summary) for policy, summary in summarise(measured).items()},
        "prompts": [_prompt(m) for m in measured],
    }


def _table(title: str, first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    return table


def _fastest(summaries: Mapping[str, Summary]) -> str:
    return max(summaries, key=lambda policy: summaries[policy].tokens_per_second)


def _cells(policy: str, summary: Summary) -> tuple[str, ...]:
    drafts = policy != PLAIN
    return (
        f"{summary.tokens_per_second:.1f}",
        f"{summary.speedup:.2f}×",
        f"{summary.tokens_per_step:.2f}",
        f"{summary.acceptance_length:.2f}" if summary.acceptance_length else "-",
        f"{summary.wasted:.2f}" if drafts else "-",
        f"{summary.outputs - summary.different} of {summary.outputs}" if drafts else "-",
    )


def _prompt(measured: Measured) -> dict[str, Any]:
    return {
        "kind": measured.prompt.kind,
        "title": measured.prompt.title,
        "text": measured.runs[PLAIN][0].outputs[0].outputs[0].text,
        "tokens_per_second": {policy: measured.tokens_per_second(policy) for policy in measured.runs},
        "different": measured.different,
    }
