"""Figures as SVG that belongs to the page: its font, its ink, light or dark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dynaspec import pictures

from .alternatives import Alternative
from .estimates import ByPosition, Calibration, LogCosts, recorded_work
from .log_data import Floats, Ints, LogData

INK, FAINT = "#010203", "#040506"
"""Stand for the page's own colours, which are put in their place when the figure is written."""
BLUE, GOLD, GREEN, RED, GREY = "#3f83cf", "#d9992f", "#2a9d6f", "#cf5b45", "#8d99a6"
"""Of series: these can be read on white and on black."""
LENGTHS = LinearSegmentedColormap.from_list("lengths", [GREY, BLUE, "#7fb069", "#f2b134"])
IMAGE_DPI = 160
POINTS = 80
"""Most points of a curve over time, which are averages: single steps tell little."""
COLUMNS = 240
"""Of the heat map."""
REQUESTS = 60
"""Most lines of the heat map."""
DOTS = 1500


def new_figure(width: float, height: float) -> Figure:
    """In inches, without a background."""
    return Figure(figsize=(width, height), dpi=IMAGE_DPI, facecolor="none", layout="constrained")


tidy = partial(pictures.tidy, ink=INK, rule=FAINT, edge=FAINT)


def legend(ax: Axes, **options: Any) -> None:
    """In one line at the right above the axes, where no curve is; ``options`` say otherwise."""
    place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 4, "borderaxespad": 0.1}
    ax.legend(**place | {"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handlelength": 1.3} | options)


def as_svg(figure: Figure, description: str) -> str:
    """An ``<svg>`` element as wide as its place; ``description`` is for those who cannot see it."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dynaspec"}), warnings.catch_warnings():
        # Names in any script: it is the reader's fonts that count, not those that the figure is measured with.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None, "Type": None, "Format": None})  # type: ignore[no-untyped-call]
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"(font: [^;\"]*?[\d.]+px) [^;\"]*", r"\1 var(--sans)", text)
    text = text.replace(INK, "var(--ink)").replace(FAINT, "var(--rule)")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(description, quote=True)}"', 1)


def lengths_over_time(data: LogData) -> str:
    """Draft length granted, drafted and accepted by an average request; how many requests there were."""
    figure = new_figure(9.2, 4.1)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    at, bins = _bins(data, POINTS)
    rows, of_step = data.rows, bins[data.rows.step]
    series = (("granted", rows.granted, GREY), ("drafted", rows.drafted, BLUE), ("accepted", rows.accepted, GREEN))
    count = np.bincount(of_step, minlength=at.size)
    for name, column, colour in series:
        _curve(top, at, _ratio(np.bincount(of_step, weights=column, minlength=at.size), count), name, colour)
    tidy(top, "Draft length", ylabel="tokens a request")
    legend(top)
    top.set_ylim(bottom=0)
    running, waiting = _mean(data.steps.requests, bins, at.size), _mean(data.steps.waiting, bins, at.size)
    bottom.fill_between(at, running, color=BLUE, alpha=0.35, linewidth=0, label="decoding")
    _curve(bottom, at, waiting, "waiting", GOLD)
    tidy(bottom, "Requests", xlabel="step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    legend(bottom)
    bottom.set_ylim(bottom=0)
    bottom.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    return as_svg(figure, "Mean draft length granted, drafted and accepted over the steps, and the number of requests")


def lengths_by_request(data: LogData) -> str:
    """Heat map: tokens drafted for each request, over time."""
    chosen = shown_requests(data)
    at, bins = _bins(data, COLUMNS)
    line = np.full(len(data.requests), -1)
    line[chosen] = np.arange(chosen.size)
    where, of_step = line[data.rows.request], bins[data.rows.step]
    keep = where >= 0
    cells = where[keep] * at.size + of_step[keep]
    size = chosen.size * at.size
    drafted = _ratio(
        np.bincount(cells, weights=data.rows.drafted[keep], minlength=size), np.bincount(cells, minlength=size)
    ).reshape(chosen.size, at.size)
    figure = new_figure(9.2, min(6.5, 1.5 + 0.16 * chosen.size))
    ax = figure.subplots()
    first, last = at[0], max(at[-1], at[0] + 1)
    image = ax.imshow(
        np.ma.masked_invalid(drafted),
        aspect="auto",
        interpolation="none",
        cmap=LENGTHS,
        vmin=0,
        vmax=max(1, data.rows.drafted.max(initial=0)),
        extent=(first, last, chosen.size - 0.5, -0.5),
    )
    tidy(ax, "Draft length by request", xlabel="step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.grid(visible=False)
    labelled = range(0, chosen.size, max(1, chosen.size // 16))
    ax.set_yticks(list(labelled), [_short(data.requests[chosen[i]]) for i in labelled], parse_math=False)
    bar = figure.colorbar(image, ax=ax, pad=0.01, fraction=0.025)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=INK, length=0)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return as_svg(figure, "Tokens drafted for each request in each step")


def shown_requests(data: LogData) -> Ints:
    """Indices of the heat map's requests: all, or some at even distances."""
    count = len(data.requests)
    return np.unique(np.linspace(0, count - 1, min(count, REQUESTS)).astype(np.int64))


def goodput(data: LogData) -> str:
    """What the controller expected, beside what came of it."""
    steps = data.steps
    at, bins = _bins(data, POINTS)
    both = np.isfinite(steps.expected_s) & (steps.step_s > 0)
    figure = new_figure(9.2, 3.3)
    left, *right = figure.subplots(1, 2, width_ratios=(2, 1)) if both.any() else [figure.subplots()]
    time, tokens = (np.bincount(bins, weights=column, minlength=at.size) for column in (steps.step_s, steps.emitted))
    _curve(left, at, _ratio(tokens, time), "measured", BLUE)
    expected = (
        ("expected", steps.expected_goodput, GOLD),
        ("if drafting", np.where(steps.draft_goodput > 0.0, steps.draft_goodput, np.nan), GREEN),
        ("if plain", steps.plain_goodput, GREY),
    )
    for name, column, colour in expected:
        if np.isfinite(column).any():
            _curve(left, at, _mean(column, bins, at.size), name, colour)
    tidy(left, "Goodput", xlabel="step", ylabel="tokens/s")
    legend(left)
    left.set_ylim(bottom=0)
    left.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for ax in right:
        _against(ax, 1e3 * steps.expected_s[both], 1e3 * steps.step_s[both], "Step time", "expected, ms")
    return as_svg(figure, "Goodput and step time, expected by the controller and measured")


def acceptance(rates: ByPosition, confidence: Calibration | None, estimate: Calibration | None) -> str:
    """Reliability of the predictions, and acceptance by position."""
    figure = new_figure(9.2, 3.6)
    *left, right = figure.subplots(1, 2) if confidence or estimate else [figure.subplots()]
    for ax in left:
        _reliability(ax, confidence, estimate)
    positions = np.arange(1, rates.tested.size + 1)
    right.bar(positions, _ratio(rates.accepted, rates.tested), color=BLUE, width=0.7)
    for place, share, count in zip(positions, _ratio(rates.accepted, rates.tested), rates.tested, strict=True):
        if positions.size <= 12:
            right.annotate(
                f"{count}", (place, share), (0, 2), textcoords="offset points", ha="center", fontsize=7.5, color=INK
            )
    tidy(right, "Conditional acceptance, and drafts tested", xlabel="position in the draft", ylabel="accepted")
    right.set(xlim=(0.4, positions.size + 0.6), ylim=(0, 1.1))
    right.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axis in (right.yaxis, *(axis for ax in left for axis in (ax.yaxis, ax.xaxis))):
        axis.set_major_formatter(PercentFormatter(1.0))
    return as_svg(figure, "Share of drafted tokens accepted, by what was predicted and by position")


def _reliability(ax: Axes, confidence: Calibration | None, estimate: Calibration | None) -> None:
    ax.plot([0, 1], [0, 1], color=FAINT, linewidth=1)
    for name, found, colour in (("drafter's confidence", confidence, GOLD), ("controller's estimate", estimate, GREEN)):
        if found is None:
            continue
        label = name if found.auc is None else f"{name}, AUC {found.auc:.3f}"
        ax.plot(found.predicted, found.observed, color=colour, label=label)
        ax.scatter(found.predicted, found.observed, s=6 + 90 * found.count / found.count.max(), color=colour, zorder=3)
    tidy(ax, "Reliability", xlabel="predicted", ylabel="accepted")
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.05))
    legend(ax, loc="lower right", bbox_to_anchor=None, ncols=1)


def step_times(data: LogData, costs: LogCosts) -> str:
    """Where a step's time goes by the tokens verified a request, and how well the fitted costs explain it."""
    figure = new_figure(9.2, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    steps = data.steps
    decoding = (steps.requests > 0) & (steps.prefill_rows == 0)
    longest = np.zeros(steps.number.size, dtype=np.int64)
    np.maximum.at(longest, data.rows.step, data.rows.drafted)
    places = np.unique(longest[decoding])
    bottom = np.zeros(places.size)
    rest = (steps.step_s - steps.draft_s - steps.verify_s).clip(min=0)
    apart = (("draft", steps.draft_s, GOLD), ("verify", steps.verify_s, BLUE), ("rest", rest, GREY))
    for name, column, colour in apart if data.split else (("step", steps.step_s, BLUE),):
        height = np.array([1e3 * column[decoding & (longest == place)].mean() for place in places])
        left.bar(places, height, bottom=bottom, color=colour, width=0.75, label=name)
        bottom += height
    tidy(left, "Step time by the longest draft in it", xlabel="tokens drafted", ylabel="ms")
    left.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if data.split:
        legend(left)
    some = steps.step_s > 0
    fitted = 1e3 * costs.price(recorded_work(data))
    _against(right, fitted[some], 1e3 * steps.step_s[some], "Cost model", "fitted, ms")
    return as_svg(
        figure, "Time of drafting, verification and the rest, and the fitted step costs against measured ones"
    )


def comparison(found: Sequence[Alternative], measured: float) -> str:
    """Estimated tokens per second of every alternative."""
    figure = new_figure(9.2, 0.9 + 0.3 * len(found))
    ax = figure.subplots()
    colours = {"plain decoding": GREY, "oracle": GREEN, "this policy": GOLD}
    places = np.arange(len(found))[::-1]
    speeds = np.array([one.tokens_per_s for one in found])
    guessed = np.array([one.extrapolated for one in found])
    ax.barh(places, speeds, color=[colours.get(one.name, BLUE) for one in found], height=0.72)
    ax.barh(
        places, speeds * guessed, left=speeds * (1 - guessed), height=0.72, fill=False, hatch="////",
        edgecolor=FAINT, linewidth=0,
    )  # fmt: skip
    for place, one in zip(places, found, strict=True):
        ax.annotate(
            f"{one.tokens_per_s:,.0f}", (one.tokens_per_s, place), (4, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=INK,
        )  # fmt: skip
    ax.axvline(measured, color=RED, linewidth=1.2, zorder=0.5, label="measured")
    tidy(ax, "Tokens per second, by the fitted costs")
    ax.grid(visible=False)
    ax.grid(axis="x", color=FAINT, linewidth=0.7)
    ax.set_yticks(places, [one.name for one in found])
    ax.margins(x=0.1)
    legend(ax)
    return as_svg(figure, "Estimated tokens per second of plain decoding, fixed lengths, the oracle and this policy")


def _curve(ax: Axes, at: Floats, values: Floats, name: str, colour: str) -> None:
    """With dots where there are few points, which might stand alone."""
    ax.plot(at, values, color=colour, label=name, marker="." if at.size < 20 else "", linewidth=1.4)


def _against(ax: Axes, x: Floats, y: Floats, title: str, xlabel: str) -> None:
    """Dots around the diagonal, up to the 99th percentile: single slow steps would hide the others."""
    tidy(ax, title, xlabel, "measured, ms")
    top = 1.1 * max(float(np.percentile(x, 99)), float(np.percentile(y, 99)))
    some = np.linspace(0, x.size - 1, min(x.size, DOTS)).astype(np.int64)
    ax.plot([0, top], [0, top], color=FAINT, linewidth=1)
    ax.scatter(x[some], y[some], s=7, color=BLUE, alpha=0.45, linewidth=0)
    ax.set(xlim=(0, top), ylim=(0, top))


def _bins(data: LogData, most: int) -> tuple[Floats, Ints]:
    """Mean step numbers [b ≤ most] of bins of steps, and [S] the bin that each step belongs to."""
    size = data.steps.number.size
    count = min(size, most)
    bins = np.arange(size) * count // size
    return _mean(data.steps.number, bins, count), bins


def _mean(column: Ints | Floats, bins: Ints, count: int) -> Floats:
    """[S] → [b], of finite values; NaN where there is none."""
    finite = np.isfinite(column)
    sums = np.bincount(bins[finite], weights=column[finite], minlength=count)
    return _ratio(sums, np.bincount(bins[finite], minlength=count))


def _ratio(part: Floats | Ints, whole: Floats | Ints) -> Floats:
    """NaN where the whole is 0."""
    result: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=np.asarray(whole) > 0)
    return result


def _short(request: str) -> str:
    return request if len(request) <= 14 else request[:6] + "…" + request[-7:]
