"""The adversarial drafter's figures as lines, as JSON and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .adversary import MOST_COST, MOST_DRAFTED, USEFUL, USELESS, AdversaryCost, Drift
from .style import GREEN, RED, new_figure, save_png, tidy

_SMOOTH = 10


def lines(cost: AdversaryCost, drift: Drift, policy: str) -> list[str]:
    """What was measured, against what is expected."""
    back = "never" if drift.recovered_after is None else f"after {drift.recovered_after} steps"
    return [
        f"An adversarial drafter costs {policy} {100 * cost.cost:.1f} % of plain decoding's speed over 400 steps "
        f"(at most {100 * cost.worst:.1f} % at 95 %); expected at most {100 * MOST_COST:.0f} %: "
        f"{_verdict(cost.cost <= MOST_COST)}",
        f"A drafter that is useless from step {USEFUL} on: mean draft length {drift.watched:.2f} in steps 131 to 160; "
        f"expected at most {MOST_DRAFTED}: {_verdict(drift.watched <= MOST_DRAFTED)}",
        f"Good again from step {USEFUL + USELESS} on: drafts are half as long as at first {back}: "
        f"{_verdict(drift.recovered_after is not None)}",
    ]


def as_document(cost: AdversaryCost, drift: Drift) -> dict[str, Any]:
    return {
        "ratio_rounds": list(cost.ratios),
        "cost": cost.cost,
        "cost_upper_bound": cost.worst,
        "mean_draft_rounds": list(cost.mean_draft),
        "mean_draft_watched": drift.watched,
        "recovered_after_steps": drift.recovered_after,
        "drafted": list(drift.drafted),
    }


def plot_drift(drift: Drift, path: Path, policy: str) -> None:
    """Writes a PNG: the draft length of every step, and its mean over ten.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(10, 3.2, f"{policy}: a drafter that is useless for a while")
    ax = figure.subplots()
    steps = np.arange(1, len(drift.drafted) + 1)
    ax.axvspan(USEFUL, USEFUL + USELESS, color=RED, alpha=0.1, label="useless")
    ax.plot(steps, drift.drafted, ".", color=GREEN, alpha=0.35, markersize=3)
    ax.plot(
        steps[_SMOOTH - 1 :],
        np.convolve(drift.drafted, np.full(_SMOOTH, 1 / _SMOOTH), "valid"),
        color=GREEN,
        linewidth=1.8,
        label=f"mean over {_SMOOTH} steps",
    )
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Draft length", "step", "tokens")
    save_png(figure, path)


def _verdict(good: bool) -> str:
    return "reached" if good else "MISSED"
