"""The report: all parts put together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dynaspec.contract.errors import ConfigError

from . import figures, page, words
from .acceptance import ByPosition, Calibration, by_position, calibrate
from .alternatives import Alternative, alternatives
from .costs import LogCosts, fit_costs
from .data import LogData, load
from .reasons import reasons
from .svg import BLUE, GOLD, GREY

_GOODPUTS = (
    "Expected: of the steps as they were planned. If drafting, if plain: of either, whichever was chosen; corrected by "
    "what such steps gave before."
)


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
        parts = (words.overview(data), words.decisions(data), words.expectations(data), words.verdict(self.found))
        return [" ".join(sentences) for sentences in parts if sentences]


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
    try:
        path.write_text(render(analysis, title), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report {path} cannot be written: {error.strerror}") from None


def render(analysis: Analysis, title: str) -> str:
    """The report as HTML that needs nothing but itself."""
    data = analysis.data
    parts = [
        page.heading(title, words.origin(data)),
        page.tiles(_tiles(analysis)),
        page.paragraphs(analysis.summary),
    ]
    if data.rows.step.size:
        parts.extend(_decoding(analysis))
    parts.append(_header(data))
    return page.document(title, parts)


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
        page.section(
            "Why requests were not drafted for",
            page.paragraphs([words.reasons_line(counted)]),
            page.shares(("what became of it", "cases", "share"), counted.most_common()),
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
    return page.section(
        "Draft lengths",
        page.figure(figures.lengths_over_time(data)),
        page.figure(figures.lengths_by_request(data), caption + left_out),
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
    return page.section(
        "What else could have been done",
        page.figure(figures.comparison(analysis.found, analysis.tokens_per_s)),
        page.paragraphs(words.caveats(analysis.data, costs, analysis.found), soft=True),
        page.details("As a table", page.table(head, rows)),
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
    drawn = page.figure(figures.goodput(data), _GOODPUTS if np.isfinite(data.steps.plain_goodput).any() else "")
    return page.section("Goodput", page.paragraphs([said]), drawn)


def _acceptance(analysis: Analysis) -> str:
    if not analysis.rates.tested.sum():
        return page.section("Acceptance", page.paragraphs(["No drafted token was tested."]))
    lines = [
        words.calibration_line("The drafter's confidence, taken as a probability,", analysis.confidence),
        words.calibration_line("The controller's estimate", analysis.estimate),
    ]
    said = [line for line in lines if line is not None] or ["Neither drafter nor controller says how sure it is."]
    left = (
        "Left: tokens in ten bins of the prediction; on the diagonal, what is said to be accepted in 70 % of the cases "
        "is. "
    )
    counted = "Counted are accepted tokens and the first rejected one of each draft; what lay behind was never tested."
    caption = left + counted if analysis.confidence or analysis.estimate else counted
    drawn = figures.acceptance(analysis.rates, analysis.confidence, analysis.estimate)
    return page.section("Acceptance", page.paragraphs(said), page.figure(drawn, caption))


def _time(data: LogData, costs: LogCosts) -> str:
    steps = data.steps
    draft, verify = float(steps.draft_s.sum()), float(steps.verify_s.sum())
    rest = max(0.0, float(steps.step_s.sum()) - draft - verify)
    rows = [(name, _milliseconds(1e3 * seconds)) for name, seconds in costs.seconds.items() if seconds > 0]
    parts = [("drafting", draft, GOLD), ("verification", verify, BLUE), ("the rest of the step", rest, GREY)]
    return page.section(
        "Where time went",
        page.split(parts) if data.split else page.paragraphs([words.whole_steps(data)]),
        page.figure(figures.step_times(data, costs), "Left: decoding steps without prefill; the mean of each length."),
        page.details("Fitted costs", page.table(("", "ms"), rows)),
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
    shown: Sequence[str] = [page.details("Header", page.preformatted(header))] if data.header.fields else []
    return page.section("The log", page.paragraphs(lines), *shown)
