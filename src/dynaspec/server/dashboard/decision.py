"""What the controller does and why, in sentences and in the few numbers behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.estimates import Estimates, Probe, chance, read_estimates
from dynaspec.observe.estimates import Mode as StepMode
from dynaspec.observe.format import duration_text
from dynaspec.observe.stats import EngineSnapshot

Mode = Literal["off", "idle", "plain", "speculating", "probing"]

_MODES: Mapping[StepMode, Mode] = {
    "plain": "plain",
    "speculate": "speculating",
    "probe_plain": "probing",
    "probe_draft": "probing",
}
_WORTH_SAYING = 0.05
"""Deviations from what was predicted, or from start-up, are mentioned from this share on."""
_SAME = 0.005
"""Goodputs that differ by a smaller share are called the same."""
_FEWEST_STEPS = 0.05
"""Costs below this many steps are called none."""
_SWITCHED: Mapping[StepMode, str] = {"plain": "off for now", "speculate": "on"}
_TOKENS = ("one token", "two", "three")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the dashboard shows. None: the policy does not say, or there is nothing to measure."""

    mode: Mode
    headline: str
    """Whether speculation helps, by how much, and why."""
    note: str = ""
    """What to do about it, or the numbers behind it."""
    reasons: tuple[str, ...] = ()
    """How it is decided, for those who want to know."""
    plain_per_s: float | None = None
    """Tokens/s expected of plain decoding."""
    drafting_per_s: float | None = None
    """Tokens/s expected with drafts; None also where nothing can be drafted."""
    measured_per_s: float | None = None
    """Tokens per second of the latest steps that decode alone."""


def explain(snapshot: EngineSnapshot, recent: SpecCounts) -> Decision:
    """What an engine decides.

    Args:
        recent: what happened in the last seconds.
    """
    if snapshot.policy == "none":
        how = "To draft, start the server with --draft-model or --speculative-config."
        return Decision(mode="off", headline="Speculation is off, because there is no drafter.", note=how)
    if snapshot.proposers and not any(snapshot.proposers.values()):
        why = "Requests go on as plain decoding. The server's log names the error; a restart switches the drafter on."
        return Decision(mode="off", headline="Speculation is off, because the drafter failed too often.", note=why)
    estimates = read_estimates(snapshot.estimates)
    if not (snapshot.running or snapshot.waiting or recent.steps):
        how = "Send a prompt below, or point a client at this server's /v1."
        return Decision(mode="idle", headline=_idle(estimates, snapshot.counts), note=how)
    measured = snapshot.steps.recent_goodput
    if estimates.mode is None:
        return _counted(snapshot, recent, measured)
    return _compared(estimates, estimates.mode, recent, measured)


def _idle(estimates: Estimates, total: SpecCounts) -> str:
    """What the last requests have shown."""
    idle = "No request is being decoded."
    if estimates.speedup is not None and estimates.mode == "speculate":
        return f"{idle} With the last ones, speculation made decoding {_times(estimates.speedup)}."
    if total.mean_acceptance_length is not None:
        return f"{idle} So far a step with a draft has given {total.mean_acceptance_length:.1f} tokens instead of one."
    return idle


# --- auto, which compares drafting with plain decoding ---


def _compared(estimates: Estimates, mode: StepMode, recent: SpecCounts, measured: float | None) -> Decision:
    return Decision(
        mode=_MODES[mode],
        headline=_headline(estimates, mode, recent),
        note=_numbers(estimates, mode),
        reasons=tuple(_reasons(estimates, mode)),
        plain_per_s=estimates.plain_goodput,
        drafting_per_s=estimates.draft_goodput or None,
        measured_per_s=measured,
    )


def _headline(estimates: Estimates, mode: StepMode, recent: SpecCounts) -> str:
    plain, drafting, speedup = estimates.plain_goodput, estimates.draft_goodput, estimates.speedup
    if mode == "probe_plain":
        return f"Speculation is on; a few steps without it show whether it still pays. {_so_far(speedup)}".rstrip()
    if mode == "probe_draft":
        return f"Speculation is off; a few steps with it show whether it pays by now. {_so_far(speedup)}".rstrip()
    if mode == "plain" and drafting == 0.0:
        return "Speculation is off for now, because the drafter finds nothing to propose."
    if plain is None or drafting is None or speedup is None:
        if mode == "plain":
            return "Speculation is off for now, because what it would bring is not known yet."
        return "Speculation is on, and the first steps are to show what it brings."
    if abs(speedup - 1.0) < _SAME:
        return f"Speculation is {_SWITCHED[mode]}, and makes no difference: {_rate(plain)} with it and without."
    if mode == "plain":
        if speedup < 1.0:
            return f"Speculation is off for now, because decoding would be {_slower(speedup)} with it."
        return (
            f"Speculation is off for now. It seems to make decoding {_times(speedup)}, and starts once that is certain."
        )
    if speedup < 1.0:
        return f"Speculation is on. It seems to make decoding {_slower(speedup)}, and stops once that is certain."
    return f"Speculation makes decoding {_times(speedup)}{_why_faster(speedup, recent)}."


def _numbers(estimates: Estimates, mode: StepMode) -> str:
    """What is expected of both modes, and where drafts do not pay how often they would be accepted."""
    said, plain, drafting = [], estimates.plain_goodput, estimates.draft_goodput
    if plain and drafting:
        said.append(f"Expected: {_rate(drafting)} with drafts, {_digits(plain)} without.")
    first = [share for one in estimates.proposers.values() for share in one.acceptance[:1] if share is not None]
    if mode == "plain" and first:
        said.append(f"The first token of a draft would be accepted in {_percent(max(first))} of the cases.")
    return " ".join(said)


def _so_far(speedup: float | None) -> str:
    if speedup is None:
        return ""
    if abs(speedup - 1.0) < _SAME:
        return "So far it makes no difference."
    return f"So far it is {_times(speedup) if speedup > 1.0 else _slower(speedup)}."


def _why_faster(speedup: float, recent: SpecCounts) -> str:
    """What a step gives and costs; nothing where the last seconds do not show it, as they were partly plain."""
    tokens = recent.tokens_per_request_step
    if tokens is None or tokens <= speedup:
        return ""
    return f": {tokens:.1f} tokens a step instead of one, and a step takes {_quantity(tokens / speedup)} times as long"


def _against(estimates: Estimates, mode: StepMode) -> bool:
    """The step does what is expected to be slower, without being a probe."""
    speedup = estimates.speedup
    if speedup is None or abs(speedup - 1.0) < _SAME:
        return False
    return (mode == "plain" and speedup > 1.0) or (mode == "speculate" and speedup < 1.0)


def _reasons(estimates: Estimates, mode: StepMode) -> list[str]:
    said: list[str | None] = []
    if _against(estimates, mode) and estimates.change_steps is not None:
        cost = _steps(estimates.change_steps)
        said.append(f"Changing over costs about {cost}: it waits until the advantage is confirmed and large enough.")
    said.append(_step(estimates))
    if estimates.token_price_s is not None:
        said.append(
            f"One more token is worth {duration_text(estimates.token_price_s)}: a draft token is added only if it is "
            "expected to bring in more than it costs."
        )
    if mode == "speculate":
        said.append(_stop(estimates.stop_below))
    said.extend(_deviations(estimates))
    if estimates.last_probe is not None:
        said.append(_last_probe(estimates.last_probe))
    return [sentence for sentence in said if sentence]


def _step(estimates: Estimates) -> str | None:
    expected = []
    if estimates.expected_tokens is not None:
        expected.append(f"emit {estimates.expected_tokens:,.1f} tokens")
    if estimates.expected_step_s is not None:
        expected.append(f"take {duration_text(estimates.expected_step_s)}")
    return f"The latest step was expected to {' and '.join(expected)}." if expected else None


def _stop(stop_below: tuple[float | None, ...]) -> str | None:
    """Where drafts end: the first thresholds, and the longest draft where they fix it."""
    last = next((done for done, level in enumerate(stop_below, 1) if level is not None and level >= 1.0), None)
    if last == 1:
        return "A draft ends after one token."
    levels = [
        f"{_percent(level)} after {done}"
        for level, done in zip(stop_below[: None if last is None else last - 1], _TOKENS, strict=False)
        if level is not None and level >= 0.001
    ]
    said = []
    if levels:
        said.append(f"A draft ends when the chance that all of it is accepted falls below {', '.join(levels)}.")
    if last is not None:
        said.append(f"It ends after {last} tokens at the latest." if levels else f"A draft ends after {last} tokens.")
    return " ".join(said)


def _deviations(estimates: Estimates) -> list[str]:
    """How measured steps differ from predicted ones, and steps now from those at start-up."""
    said = []
    for steps, ratio in (
        ("Steps with drafts", estimates.draft_measured_over_expected),
        ("Plain steps", estimates.plain_measured_over_expected),
    ):
        if ratio is not None and abs(ratio - 1.0) >= _WORTH_SAYING:
            word = "more" if ratio > 1.0 else "fewer"
            share = _percent(abs(ratio - 1.0))
            said.append(f"{steps} gave {share} {word} tokens/s than predicted; the comparison allows for that.")
    factor = estimates.speed_factor
    if factor is not None and abs(factor - 1.0) >= _WORTH_SAYING:
        word = "more" if factor > 1.0 else "less"
        said.append(f"Steps take {_percent(abs(factor - 1.0))} {word} time than at start-up.")
    return said


def _last_probe(probe: Probe) -> str:
    what = "drafting" if probe.mode == "draft" else "plain decoding"
    count = "1 step" if probe.steps == 1 else f"{probe.steps:,} steps"
    ago = "just now" if probe.steps_ago == 0 else f"{probe.steps_ago:,} step{'s' * (probe.steps_ago != 1)} ago"
    if abs(probe.cost_steps) < _FEWEST_STEPS:
        outcome = "cost next to nothing"
    elif probe.cost_steps > 0:
        outcome = f"cost the time of {_steps(probe.cost_steps)}"
    else:
        outcome = f"gained the time of {_steps(-probe.cost_steps)}"
    return f"The last probe tried {what} for {count}; it ended {ago} and {outcome}."


# --- other policies, which compare nothing ---


def _counted(snapshot: EngineSnapshot, recent: SpecCounts, measured: float | None) -> Decision:
    if not recent.drafts:
        headline = f"Speculation is off for now: the policy “{snapshot.policy}” drafts nothing."
        return Decision(mode="plain", headline=headline, measured_per_s=measured)
    drafted, accepted = recent.draft_tokens / recent.drafts, recent.accepted / recent.drafts
    acceptance = chance(snapshot.estimates.get("acceptance"))
    threshold = chance(snapshot.estimates.get("draft_confidence_threshold"))
    said = []
    if acceptance is not None:
        said.append(f"It expects {_percent(acceptance)} of the draft tokens to be accepted.")
    if threshold:
        said.append(f"A draft ends where the drafter's confidence falls below {threshold:.2f}.")
    return Decision(
        mode="speculating",
        headline=(
            f"Speculation gives {recent.mean_acceptance_length:.1f} tokens a step instead of one: the policy "
            f"“{snapshot.policy}” drafts {drafted:.1f} tokens at a time, and {accepted:.1f} are accepted."
        ),
        note="Whether that is faster than plain decoding, only the policy “auto” measures.",
        reasons=tuple(said),
        measured_per_s=measured,
    )


# --- numbers as they are written; a line must not end before a unit ---


def _times(ratio: float) -> str:
    return f"{_quantity(ratio)} times as fast"


def _slower(ratio: float) -> str:
    return f"{_percent(1.0 - ratio)} slower"


def _quantity(ratio: float) -> str:
    return f"{ratio:,.{1 if ratio >= 10.0 else 2}f}"


def _rate(tokens_per_s: float) -> str:
    return f"{_digits(tokens_per_s)} tokens/s"


def _digits(number: float) -> str:
    return f"{number:,.{0 if number >= 10 else 1}f}"


def _steps(number: float) -> str:
    return f"{number:,.1f} steps"


def _percent(share: float) -> str:
    return f"{100 * share:,.{0 if share >= 0.1 else 1}f}\u00a0%"
