"""Ways of decoding side by side: tables for people, JSON for programs, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dynaspec.control.policies.short_names import PLAIN
from dynaspec.observe.counts import SpecCounts

from .offline import PolicyResult
from .report import identical_text, number_text, percent_text, rates_text
from .session import Session
from .style import EDGE, INK, SERIES, new_figure, save_png, tidy

_TOTAL = "all"
_MOST_BARS = 42
"""In a line of the picture, gaps between groups counted."""


def methods_table(results: Sequence[PolicyResult], title: str) -> Table:
    """One way a line; counts and times are those of the last round.

    The acceptance length is that of steps with a draft, the target's own token included; tokens per step are those of
    all steps of a request. Rows are the target's, for a request in a step. Drafting is its share of the steps' time.
    """
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("\nmethod", no_wrap=True)
    for heading in ("\nidentical", "tokens\n/ s", "speed-\nup", "in the\nrounds", "accept.\nlength", "tokens\n/ step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("accepted\nper position", no_wrap=True)
    for heading in ("draft-\ning", "rows\n/ step"):
        table.add_column(heading, justify="right", no_wrap=True)
    fastest = max(result.tokens_per_second for result in results)
    for result in results:
        counts = result.counts
        style = "bold green" if result.tokens_per_second == fastest else ""
        table.add_row(
            Text(result.name, style=style),
            identical_text(result),
            Text(f"{result.tokens_per_second:.1f}", style=style),
            Text(f"{result.speedup:.2f}×", style=style),
            "-" if result.name == PLAIN else spread_text(result),
            number_text(counts.mean_acceptance_length),
            number_text(counts.tokens_per_request_step),
            rates_text(counts.rate_per_position),
            percent_text(drafting_share(counts)),
            number_text(target_rows(counts)),
        )
    return table


def categories_table(session: Session) -> Table:
    """Kinds of prompts down, ways across: times plain decoding's speed."""
    speedups = _with_total(session)
    table = Table(box=SIMPLE_HEAD, title="Speed-up by category", title_justify="left", pad_edge=False)
    table.add_column("category", no_wrap=True)
    ways = [name for name in speedups if name != PLAIN]
    for name in ways:
        table.add_column(name, justify="right")
    for category in speedups[PLAIN]:
        best = max(ways, key=lambda name: speedups[name][category])
        cells = [Text(f"{speedups[name][category]:.2f}×", style="bold green" if name == best else "") for name in ways]
        table.add_row(category, *cells)
    return table


def plot_categories(session: Session, path: Path, model: str, title: str) -> None:
    """Writes a PNG: a group of bars for every kind of prompt, a bar for every way.

    Raises:
        ConfigError: the file cannot be written.
    """
    speedups = _with_total(session)
    ways, categories = [name for name in speedups if name != PLAIN], list(speedups[PLAIN])
    beside = max(1, int(_MOST_BARS / (len(ways) + 1)))
    lines = [categories[i : i + beside] for i in range(0, len(categories), beside)]
    size = max(8.0, 1.5 + 0.28 * len(lines[0]) * (len(ways) + 1)), 1.4 + 3.0 * len(lines)
    figure = new_figure(*size, f"{model}: speed-up over plain decoding")
    panels = figure.subplots(len(lines), 1, sharey=True, squeeze=False)[:, 0]
    for ax, shown in zip(panels, lines, strict=True):
        _draw(ax, {name: [speedups[name][category] for category in shown] for name in ways})
        tidy(ax, title if ax is panels[0] else "", "", "times")
        ax.set_xticks(range(len(shown)), shown, fontsize=9, color=INK)
        ax.set_xlim(-0.6, len(lines[0]) - 0.4)  # bars of all lines are as wide
        ax.margins(y=0.18)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9
    )
    save_png(figure, path)


def _draw(ax: Axes, heights: Mapping[str, Sequence[float]]) -> None:
    """A bar for every way in each group."""
    width = 0.8 / len(heights)
    for i, (name, of_way) in enumerate(heights.items()):
        places = [x + (i - (len(heights) - 1) / 2) * width for x in range(len(of_way))]
        bars = ax.bar(places, of_way, 0.9 * width, color=SERIES[i % len(SERIES)], label=name, zorder=2)
        ax.bar_label(bars, [f"{height:.2f}" for height in of_way], fontsize=6.5, padding=2, color=INK)
    ax.axhline(1.0, color=EDGE, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)


def as_document(session: Session, options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Everything measured, with its provenance, as JSON values.

    Args:
        given: way → its ``speculative_config``.
    """
    document = session.document(options)
    for entry, result in zip(document["results"], session.results, strict=True):
        counts = result.counts
        entry |= {
            "speculative_config": given[result.name],
            "drafting_share": drafting_share(counts),
            "target_rows_per_request_step": target_rows(counts),
        }
    return document | {"left_out": dict(session.left_out)}


def drafting_share(counts: SpecCounts) -> float | None:
    """Of the time of all steps, prefill included; None where the host does not tell."""
    return counts.draft_s / counts.step_s if counts.step_s else None


def target_rows(counts: SpecCounts) -> float | None:
    """Rows that the target processes for a decoding request in a step: its last token's, and those of its draft."""
    return 1 + counts.verified / counts.request_steps if counts.request_steps else None


def spread_text(result: PolicyResult) -> str:
    """The lowest and the highest speed-up of a round."""
    return f"{min(result.speedups):.2f}–{max(result.speedups):.2f}"


def title_of(options: Mapping[str, Any]) -> str:
    """How much was decoded, and how."""
    drawn = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']}"
    at_once = options["engine"]["max_num_seqs"]
    how_many = "one request at a time" if at_once == 1 else f"{at_once} requests at once"
    given = options.get("prompts_in_file", options["num_prompts"])
    prompts = f"{options['num_prompts']} of {given}" if given != options["num_prompts"] else given
    rounds = "1 round" if options["rounds"] == 1 else f"{options['rounds']} rounds"
    return f"{prompts} prompts, up to {options['max_tokens']} tokens each, {drawn}, {how_many}, {rounds}"


def remarks(session: Session) -> list[str]:
    """A sentence for the ways that are missing, by the reason, and for every one whose drafter failed."""
    missing: dict[str, list[str]] = {}
    for name, reason in session.left_out.items():
        missing.setdefault(reason, []).append(name)
    faults = {result.name: sum(run.counts.proposer_faults for run in result.runs) for result in session.results}
    failed = [
        f"the drafter of {name} failed {count} times; it went on plainly" for name, count in faults.items() if count
    ]
    return [f"left out: {', '.join(names)}: {reason}" for reason, names in missing.items()] + failed


def _with_total(session: Session) -> dict[str, dict[str, float]]:
    """Way → kind of prompt → speed-up, at last over all prompts."""
    speedups = session.speedups
    return {
        result.name: {name: ratio for name, ratio in speedups[result.name].items() if name != _TOTAL}
        | {_TOTAL: result.speedup}
        for result in session.results
    }
