"""The report of ``dynaspec explain``: one HTML file without scripts or network, and its summary as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from dynaspec.result_output import write_text

from . import figures, sentences
from .alternatives import Alternative, alternatives, reasons
from .estimates import ByPosition, Calibration, LogCosts, by_position, calibrate, fit_costs
from .figures import BLUE, GOLD, GREY
from .log_data import LogData, load

STYLE = """
:root { color-scheme: light dark; --ink: #252b33; --soft: #5d6875; --rule: #dde2e8; --page: #ffffff; --card: #f6f8fa;
  --bar: #3f83cf; --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe4ea; --soft: #98a3b0; --rule: #343b44; --page: #15181c;
  --card: #1d2127; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 var(--sans); -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .5rem; padding-top: 1.1rem; border-top: 1px solid var(--rule); }
p, li { max-width: 46rem; }
p { margin: .5rem 0; }
.soft, figcaption, summary { color: var(--soft); font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.5rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.2; font-variant-numeric: tabular-nums; font-weight: 650; }
.tile span { color: var(--soft); font-size: .82rem; }
figure { margin: 1.25rem 0; }
svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .75rem 0; }
th, td { padding: .28rem .9rem .28rem 0; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; color: var(--soft); }
th:first-child, td:first-child { text-align: left; }
td.bar { width: 14rem; }
td.bar i { display: block; height: .6rem; margin-top: .4rem; border-radius: .2rem; background: var(--bar); }
.warning { padding: .7rem 1rem; border-left: .25rem solid #b45309; background: var(--card); font-weight: 600; }
.split { display: flex; height: 1.1rem; border-radius: .3rem; overflow: hidden; margin: .9rem 0 .4rem; gap: 2px; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin-right: .4rem; }
.keys span { margin-right: 1.4rem; font-size: .9rem; white-space: nowrap; }
details { margin: .75rem 0; }
pre { background: var(--card); padding: .8rem 1rem; border-radius: .5rem; overflow-x: auto; font-size: .82rem; }
"""
_GOODPUTS = (
    "Expected: of the steps as they were planned. If drafting, if plain: of either, whichever was chosen; corrected by "
    "what such steps gave before."
)


def document(title: str, body: Sequence[str]) -> str:
    """The whole file."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def heading(title: str, subtitle: str) -> str:
    return f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>'


def section(title: str, *parts: str) -> str:
    return "\n".join([f"<section>\n<h2>{escape(title)}</h2>", *parts, "</section>"])


def paragraphs(lines: Sequence[str], *, soft: bool = False) -> str:
    kind = ' class="soft"' if soft else ""
    return "\n".join(f"<p{kind}>{escape(line)}</p>" for line in lines)


def figure(svg: str, caption: str = "") -> str:
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{svg}{said}</figure>"


def tiles(values: Mapping[str, str]) -> str:
    """Large figures, each with what it is."""
    cells = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in values.items()
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text at the left, numbers at the right."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def shares(head: Sequence[str], counts: Sequence[tuple[str, int]]) -> str:
    """A table of counts, with a bar for each count's share of all."""
    total = sum(count for _, count in counts) or 1
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = (
        f"<tr><td>{escape(name)}</td><td>{count:,}</td><td>{100 * count / total:.1f} %</td>"
        f'<td class="bar"><i style="width:{100 * count / total:.2f}%"></i></td></tr>'
        for name, count in counts
    )
    return f'<div class="scroll"><table><tr>{top}<th></th></tr>{"".join(lines)}</table></div>'


def split(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of parts that make a whole.

    Args:
        parts: name, amount ≥ 0, colour.
    """
    total = sum(amount for _, amount, _ in parts) or 1.0
    bars = (f'<i style="flex:{amount / total:.5f};background:{colour}"></i>' for _, amount, colour in parts)
    keys = (
        f'<span><i class="key" style="background:{colour}"></i>{escape(name)} {100 * amount / total:.0f} %</span>'
        for name, amount, colour in parts
    )
    return f'<div class="split">{"".join(bars)}</div><p class="keys">{"".join(keys)}</p>'


def details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was found in a log."""

    data: LogData
    costs: LogCosts | None
    """None: the host measured no times."""
    rates: ByPosition
    confidence: Calibration | None
    estimate: Calibration | None
    found: tuple[Alternative, ...]
    """Empty without times."""

    @property
    def tokens_per_s(self) -> float:
        """Measured; 0 without times."""
        seconds = float(self.data.steps.step_s.sum())
        return float(self.data.rows.emitted.sum()) / seconds if seconds > 0 else 0.0

    @property
    def summary(self) -> list[str]:
        """The log in a few paragraphs."""
        data = self.data
        parts = (
            sentences.overview(data),
            sentences.decisions(data),
            sentences.expectations(data),
            [] if self.warning is None else [self.warning],
            sentences.verdict(self.found),
        )
        return [" ".join(lines) for lines in parts if lines]

    @property
    def warning(self) -> str | None:
        """Of estimates that are not to be relied on."""
        return None if self.costs is None else sentences.poor_fit(self.costs, self.found, self.tokens_per_s)


def analyse(path: Path) -> Analysis:
    """
    Raises:
        ConfigError: no readable decision log with at least one committed step.
    """
    data = load(path)
    rates, costs = by_position(data.verdicts), fit_costs(data)
    return Analysis(
        data=data,
        costs=costs,
        rates=rates,
        confidence=calibrate(data.verdicts.confidence, data.verdicts.accepted),
        estimate=calibrate(data.verdicts.estimate, data.verdicts.accepted),
        found=() if costs is None else tuple(alternatives(data, costs)),
    )


def write_report(analysis: Analysis, path: Path, title: str) -> None:
    """
    Raises:
        ConfigError: the file cannot be written.
    """
    write_text(path, render(analysis, title))


def render(analysis: Analysis, title: str) -> str:
    """The report as HTML that needs nothing but itself."""
    data = analysis.data
    parts = [
        heading(title, sentences.origin(data)),
        tiles(_tiles(analysis)),
        paragraphs(analysis.summary),
    ]
    if data.rows.step.size:
        parts.extend(_decoding(analysis))
    parts.append(_header(data))
    return document(title, parts)


def _decoding(analysis: Analysis) -> list[str]:
    """What there is to say once a request has been decoded."""
    data = analysis.data
    parts = [_lengths(data)]
    if analysis.costs is not None:
        if analysis.found:
            parts.append(_comparison(analysis, analysis.costs))
        parts.append(_goodput(analysis))
    parts.append(_acceptance(analysis))
    if analysis.costs is not None:
        parts.append(_time(data, analysis.costs))
    counted = reasons(data)
    parts.append(
        section(
            "Why requests were not drafted for",
            paragraphs([sentences.reasons_line(counted)]),
            shares(("what became of it", "cases", "share"), counted.most_common()),
        )
    )
    return parts


def _tiles(analysis: Analysis) -> dict[str, str]:
    data = analysis.data
    rows = data.rows
    drafted = rows.drafted > 0
    values = {}
    if analysis.tokens_per_s:
        values["tokens/s, measured"] = f"{analysis.tokens_per_s:,.0f}"
    if rows.step.size:
        values["tokens a request and step"] = f"{rows.emitted.mean():.2f}"
        values["tokens drafted, mean"] = f"{rows.drafted.mean():.2f}"
    if drafted.any():
        values["of drafted tokens accepted"] = f"{100 * rows.accepted.sum() / rows.drafted.sum():.0f} %"
    values["most requests at a time"] = f"{data.steps.requests.max()}"
    return values


def _lengths(data: LogData) -> str:
    shown = figures.shown_requests(data).size
    left_out = "" if shown == len(data.requests) else f" {shown} of {len(data.requests):,} requests are shown."
    caption = "Each line is a request, in order of arrival; blank where it did not decode. Grey: nothing drafted."
    return section(
        "Draft lengths",
        figure(figures.lengths_over_time(data)),
        figure(figures.lengths_by_request(data), caption + left_out),
    )


def _comparison(analysis: Analysis, costs: LogCosts) -> str:
    rows = [
        (
            one.name,
            f"{one.tokens_per_s:,.0f}",
            f"{one.tokens_per_request_step:.2f}",
            f"{one.drafted_per_token:.2f}",
            f"{100 * one.extrapolated:.0f} %",
        )
        for one in analysis.found
    ]
    head = ("", "tokens/s", "tokens a request and step", "drafted a token", "extrapolated")
    return section(
        "What else could have been done",
        *([] if analysis.warning is None else [f'<p class="warning">{escape(analysis.warning)}</p>']),
        figure(figures.comparison(analysis.found, analysis.tokens_per_s)),
        paragraphs(sentences.caveats(analysis.data, costs, analysis.found), soft=True),
        details("As a table", table(head, rows)),
    )


def _goodput(analysis: Analysis) -> str:
    data = analysis.data
    expected = np.isfinite(data.steps.expected_s) & (data.steps.step_s > 0)
    if expected.any():
        ratio = data.steps.expected_s[expected] / data.steps.step_s[expected]
        said = (
            f"The controller's expected step time was off by {100 * np.median(np.abs(ratio - 1)):.0f} % in the median."
        )
    elif np.isfinite(data.steps.plain_goodput).any() or np.isfinite(data.steps.draft_goodput).any():
        said = "The controller expects a goodput, but says no step time."
    else:
        said = "This controller expects neither a goodput nor a step time, so there is only what was measured."
    drawn = figure(figures.goodput(data), _GOODPUTS if np.isfinite(data.steps.plain_goodput).any() else "")
    return section("Goodput", paragraphs([said]), drawn)


def _acceptance(analysis: Analysis) -> str:
    if not analysis.rates.tested.sum():
        return section("Acceptance", paragraphs(["No drafted token was tested."]))
    lines = [
        sentences.calibration_line("The drafter's confidence, taken as a probability,", analysis.confidence),
        sentences.calibration_line("The controller's estimate", analysis.estimate),
    ]
    said = [line for line in lines if line is not None] or ["Neither drafter nor controller says how sure it is."]
    left = (
        "Left: tokens in ten bins of the prediction; on the diagonal, what is said to be accepted in 70 % of the cases "
        "is. "
    )
    counted = "Counted are accepted tokens and the first rejected one of each draft; what lay behind was never tested."
    caption = left + counted if analysis.confidence or analysis.estimate else counted
    drawn = figures.acceptance(analysis.rates, analysis.confidence, analysis.estimate)
    return section("Acceptance", paragraphs(said), figure(drawn, caption))


def _time(data: LogData, costs: LogCosts) -> str:
    steps = data.steps
    draft, verify = float(steps.draft_s.sum()), float(steps.verify_s.sum())
    rest = max(0.0, float(steps.step_s.sum()) - draft - verify)
    rows = [(name, _milliseconds(1e3 * seconds)) for name, seconds in costs.seconds.items() if seconds > 0]
    parts = [("drafting", draft, GOLD), ("verification", verify, BLUE), ("the rest of the step", rest, GREY)]
    return section(
        "Where time went",
        split(parts) if data.split else paragraphs([sentences.whole_steps(data)]),
        figure(figures.step_times(data, costs), "Left: decoding steps without prefill; the mean of each length."),
        details("Fitted costs", table(("", "ms"), rows)),
    )


def _milliseconds(value: float) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.2f}"


def _header(data: LogData) -> str:
    steps = data.steps.number
    lines = [f"Steps {steps[0]:,} to {steps[-1]:,}."]
    if data.given_up:
        lines.append(
            f"{data.given_up:,} planned steps were given up, or not committed before the log ends; they are left out."
        )
    header = json.dumps(dict(data.header.fields), indent=2, ensure_ascii=False, default=str)
    shown: Sequence[str] = [details("Header", preformatted(header))] if data.header.fields else []
    return section("The log", paragraphs(lines), *shown)
