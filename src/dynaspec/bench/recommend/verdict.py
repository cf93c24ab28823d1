"""What to configure, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dynaspec.simulate.policies import PLAIN

from .comparison import AUTO, FIXED, SCHEDULE, Predicted

CLEARLY = 0.02
"""Differences of speed below this share are called none."""

MARGIN = 0.05
"""Auto is preferred while it is slower by no more: fixed lengths and schedules are judged by the very figures that they
were derived from, while auto learns its own, and goes on where load or text change."""

Choice = Literal["auto", "fixed", "schedule", "plain"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A recommendation."""

    choice: Choice
    length: int | None
    """For ``fixed``."""
    reasons: tuple[str, ...]
    """Sentences."""


def decide(predicted: Predicted) -> Verdict:
    """``auto``, unless a fixed length or a schedule is clearly faster over all loads, or nothing pays at any."""
    if not _pays(predicted):
        return Verdict("plain", None, (_no_gain(predicted),))
    best = max((name for name in predicted.speeds if name not in (PLAIN, AUTO)), key=predicted.over_plain)
    auto, other = predicted.over_plain(AUTO), predicted.over_plain(best)
    if auto >= (1 - MARGIN) * other and auto > 1:
        preferred = [_preferred_to(best)] if other > auto else []
        return Verdict("auto", None, (*_for_auto(predicted), *preferred))
    why = f"Over all loads, {_called(best)} reaches {other:.2f} times plain decoding's speed, and auto {auto:.2f}."
    if other <= 1:
        return Verdict("plain", None, (why, "So over all of these loads together, drafting loses."))
    if best == SCHEDULE:
        return Verdict("schedule", None, (why,))
    return Verdict("fixed", int(best.removeprefix(FIXED)), (why,))


def _pays(predicted: Predicted) -> bool:
    plain = predicted.speeds[PLAIN]
    return any(
        speed > (1 + CLEARLY) * plain[at] for found in predicted.speeds.values() for at, speed in enumerate(found)
    )


def _no_gain(predicted: Predicted) -> str:
    gains = [
        max(found[at] for name, found in predicted.speeds.items() if name != PLAIN) / plain - 1
        for at, plain in enumerate(predicted.speeds[PLAIN])
    ]
    return f"The drafter does not pay at any load: the best policy gains {100 * max(0.0, *gains):.0f} % at most."


def _for_auto(predicted: Predicted) -> list[str]:
    lines = [f"Over all loads, auto reaches {predicted.over_plain(AUTO):.2f} times plain decoding's speed."]
    lengths = [predicted.best_fixed(at) for at in range(len(predicted.loads))]
    drafts = [predicted.fixed[k][at] > predicted.speeds[PLAIN][at] for at, k in enumerate(lengths)]
    if not all(drafts):
        first = predicted.loads[drafts.index(False)]
        lines.append(f"From {first} requests at once on, no fixed length is faster than plain decoding.")
    elif len(set(lengths)) > 1:
        lines.append(
            f"No length is the best everywhere: it is {lengths[0]} at {predicted.loads[0]} and {lengths[-1]} at "
            f"{predicted.loads[-1]} requests at once."
        )
    slower = [
        str(load)
        for at, load in enumerate(predicted.loads)
        if predicted.speeds[AUTO][at] < (1 - CLEARLY) * predicted.speeds[PLAIN][at]
    ]
    if slower:
        lines.append(f"At {', '.join(slower)} requests at once it is slower than an engine without a drafter.")
    best = max(predicted.fixed, key=lambda k: predicted.over_plain(f"{FIXED}{k}"))
    ratio = predicted.over_plain(f"{FIXED}{best}")
    lines.append(f"The best single length, {best}, reaches {ratio:.2f} times that speed.")
    return lines


def _preferred_to(faster: str) -> str:
    return (
        f"{_called(faster).capitalize()} is faster, but by no more than {100 * MARGIN:.0f} % of its speed: auto is "
        "preferred, as it learns its own figures and follows load and text, where the other is judged by those it came "
        "from."
    )


def _called(policy: str) -> str:
    if policy.startswith(FIXED):
        return f"the fixed length {policy.removeprefix(FIXED)}"
    return "a schedule by batch size"
