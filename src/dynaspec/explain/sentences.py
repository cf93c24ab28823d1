"""What the log shows, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dynaspec.observe.format import duration_text

from .alternatives import DRAFTED, Alternative, step_reason
from .estimates import Calibration, LogCosts
from .log_data import EMBEDDED, LogData, LogSteps

CLEARLY = 0.02
"""Differences of speed below this share are called none."""
POOR_FIT = 0.2
"""From this error of the median step on, the fitted costs are called poor."""
POOR_SPEED = 0.1
"""The same for tokens per second of the whole log: what the fit gives for it, against what was measured."""
SPOKEN_FOR = 0.2
"""Most of its tokens that may be extrapolated for the summary to speak of an alternative."""

_FEWEST_STEPS = 0.05
"""Costs of probes below this many steps are called none."""
_MODES = {
    "plain": "plain decoding",
    "speculate": "drafting",
    "probe_plain": "probes of plain decoding",
    "probe_draft": "probes of drafting",
}
_ENGINES = {"vllm": "vLLM", "transformers": "Transformers"}


def policy_name(data: LogData) -> str:
    """The policy, as far as the header names it."""
    config = data.header.speculative_config
    if not isinstance(config, dict):
        return "controller"
    named = config.get("policy")
    if named is None and config.get("draft_confidence_threshold") is not None:
        named = "confidence"
    return f"policy “{named}”" if named else "default policy"


def origin(data: LogData) -> str:
    """Whose decisions these are, and on which engine."""
    engine = "" if data.host == EMBEDDED else f" on {engine_name(data)}"
    return f"Decisions of the {policy_name(data)}{engine}, dynaspec {data.header.dynaspec}"


def engine_name(data: LogData) -> str:
    """As it is written."""
    return _ENGINES.get(data.host, data.host)


def whole_steps(data: LogData) -> str:
    """Of a host that cannot tell drafting from verifying."""
    return (
        f"{engine_name(data)} says how long a step took, not how much of that was drafting: what a draft costs is "
        "fitted to the work of the steps."
    )


def overview(data: LogData) -> list[str]:
    """What was decoded, how fast, and how speculation did."""
    steps, rows = data.steps, data.rows
    seconds, tokens = float(steps.step_s.sum()), int(rows.emitted.sum())
    speed = f" in {seconds:.3g} s of steps, {tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
    lines = [
        f"{_count(steps.number.size, 'step')} decoded {_count(len(data.requests), 'request')}, at most "
        f"{int(steps.requests.max())} at a time: {_count(tokens, 'token')}{speed}."
    ]
    drafts = rows.drafted > 0
    if not rows.step.size:
        return [*lines, "No step had a decoding request, so nothing was to be decided."]
    if not drafts.any():
        return [*lines, "Nothing was drafted: all of it was plain decoding."]
    drafted, accepted = int(rows.drafted.sum()), int(rows.accepted.sum())
    lines.append(
        f"A draft was made in {_percent(drafts.mean())} of all cases (a request in a step), of "
        f"{rows.drafted[drafts].mean():.1f} tokens on average; {_percent(accepted / drafted)} of the drafted tokens "
        f"were accepted. A request got {rows.emitted.mean():.2f} tokens a step, "
        f"{rows.emitted[drafts].mean():.2f} with a draft."
    )
    lengths = np.percentile(rows.drafted[drafts], (10, 50, 90))
    low, middle, high = (f"{length:.0f}" for length in lengths)
    if low == high:
        lines.append(f"Nearly all drafts had {_count(int(float(middle)), 'token')}.")
    else:
        lines.append(f"Half of the drafts had {middle} tokens or more; the middle 80 % had {low} to {high}.")
    return lines


def decisions(data: LogData) -> list[str]:
    """What the controller said it did, and why."""
    modes = Counter(mode for mode in data.modes if mode)
    if not modes:
        return []
    shares = ", ".join(f"{_mode(mode)} {_percent(count / len(data.modes))}" for mode, count in modes.most_common())
    lines = [f"By its own account the controller's steps were: {shares}."]
    said = Counter((mode, step_reason(data, step)) for step, mode in enumerate(data.modes))
    for mode, _ in modes.most_common(3):
        reasons = [(why, count) for (of, why), count in said.most_common() if of == mode and why]
        if reasons:
            why, count = reasons[0]
            often = "always" if count == modes[mode] else f"most often ({_percent(count / modes[mode])})"
            lines.append(f"Its reason for {_mode(mode)} was {often}: {why}.")
    return lines


def expectations(data: LogData) -> list[str]:
    """What the controller expected of its steps, and what its probes cost."""
    lines = [*_expected_steps(data.steps), *_expected_speedup(data.steps)]
    prices = data.steps.token_price_s[np.isfinite(data.steps.token_price_s)]
    if prices.size:
        lines.append(
            f"One more token was worth {duration_text(float(np.median(prices)))} in the median: a draft token was "
            "added only if it was expected to bring in more than it cost."
        )
    return [*lines, *_probes(data)]


def _expected_steps(steps: LogSteps) -> list[str]:
    """Tokens of the mean step, as expectations are means; seconds of the median one, as some steps are disturbed."""
    lines, known = [], np.isfinite(steps.expected_tokens)
    if known.any():
        expected, emitted = steps.expected_tokens[known].mean(), steps.emitted[known].mean()
        lines.append(f"On average a step was expected to emit {expected:,.2f} tokens and emitted {emitted:,.2f}.")
    known = np.isfinite(steps.expected_s)
    if known.any():
        expected, took = (float(np.median(seconds[known])) for seconds in (steps.expected_s, steps.step_s))
        measured = f" and took {duration_text(took)}" if took > 0.0 else ""
        lines.append(f"The median step was expected to take {duration_text(expected)}{measured}.")
    return lines


def _expected_speedup(steps: LogSteps) -> list[str]:
    """Which of drafting and plain decoding was expected to be faster, and by how much."""
    lines, ratio = [], steps.expected_speedup
    ratio = ratio[np.isfinite(ratio)]
    drafting, plain = ratio[ratio > 1.0], ratio[(ratio > 0.0) & (ratio < 1.0)]
    if drafting.size:
        lines.append(
            f"Drafting was expected to be faster than plain decoding in "
            f"{_part(drafting.size, ratio.size)}, by {_percent(float(np.median(drafting)) - 1.0)} in the median."
        )
    if plain.size:
        lines.append(
            f"Plain decoding was expected to be faster than drafting in "
            f"{_part(plain.size, ratio.size)}, by {_percent(float(np.median(1.0 / plain)) - 1.0)} in the median."
        )
    nothing = int((steps.draft_goodput == 0.0).sum())
    if nothing:
        lines.append(f"Nothing could be drafted in {_count(nothing, 'step')}.")
    return lines


def _part(number: int, whole: int) -> str:
    """So many of all steps."""
    return (
        f"all {_count(whole, 'step')}" if number == whole else f"{_percent(number / whole)} of {_count(whole, 'step')}"
    )


def _probes(data: LogData) -> list[str]:
    """How many probes ended, what they cost together, and what the last one cost."""
    if not data.probes:
        return []
    drafting = sum(probe.mode == "draft" for probe in data.probes)
    kinds = ((drafting, "drafting"), (len(data.probes) - drafting, "plain decoding"))
    named = " and ".join(f"{_count(number, 'probe')} of {mode}" for number, mode in kinds if number)
    cost, last = sum(probe.cost_steps for probe in data.probes), data.probes[-1]
    share = f", {_percent(cost / len(data.modes))} of all" if cost >= _FEWEST_STEPS else ""
    lines = [
        f"{named} ended in the log; {'it' if len(data.probes) == 1 else 'together they'} {_probe_cost(cost)}{share}."
    ]
    if len(data.probes) > 1:
        mode = "drafting" if last.mode == "draft" else "plain decoding"
        lines.append(f"The last one tried {mode} for {_count(last.steps, 'step')} and {_probe_cost(last.cost_steps)}.")
    return lines


def _probe_cost(steps: float) -> str:
    if abs(steps) < _FEWEST_STEPS:
        return "cost next to nothing"
    return f"{'cost' if steps > 0 else 'gained'} the time of {abs(steps):,.1f} steps"


def verdict(found: Sequence[Alternative]) -> list[str]:
    """How the policy compares, by the log's own estimate."""
    by_name = {one.name: one for one in found}
    own, plain = by_name.get("this policy"), by_name.get("plain decoding")
    if own is None or plain is None or not plain.tokens_per_s > 0 or not own.tokens_per_s > 0:
        return []
    if own.drafted_per_token == 0:
        return []  # it was plain decoding
    lines = [f"By estimate, plain decoding would have been {_compared(own, plain)}."]
    fixed = [one for one in found if one.length and one.extrapolated <= SPOKEN_FOR]
    if not fixed:
        return [*lines, "Of other draft lengths the log says too little."]
    best = max(fixed, key=lambda one: one.tokens_per_s)
    all_of_them = len(fixed) == sum(bool(one.length) for one in found)
    among = "" if all_of_them else f" among those that the log can speak for (up to {fixed[-1].length})"
    lines.append(f"The best fixed length{among}, {best.length}, would have been {_compared(own, best)}.")
    oracle = by_name["oracle"]
    reference = max(best.tokens_per_s, plain.tokens_per_s)
    gap = oracle.tokens_per_s - reference
    if oracle.extrapolated <= SPOKEN_FOR and gap > CLEARLY * reference:
        lines.append(
            f"The oracle, which drafts exactly as far as the target agrees, stands at {oracle.tokens_per_s:,.0f} "
            f"tokens/s: of its lead over the better of these two, {_closed((own.tokens_per_s - reference) / gap)}."
        )
    return lines


def poor_fit(costs: LogCosts, found: Sequence[Alternative], measured: float) -> str | None:
    """A warning where the estimates rest on costs that do not explain the log.

    Args:
        measured: tokens per second of the log; 0 = not known.
    """
    faults = []
    if costs.error >= POOR_FIT:
        faults.append(f"the median step is off by {_percent(costs.error)}")
    own = next((one.tokens_per_s for one in found if one.name == "this policy"), 0.0)
    if own > 0 and measured > 0 and abs(own / measured - 1) >= POOR_SPEED:
        faults.append(f"they give {own:,.0f} tokens/s for this policy, where {measured:,.0f} were measured")
    if not faults:
        return None
    return (
        f"Warning: the fitted costs explain this log poorly ({'; '.join(faults)}). Do not rely on what is said about "
        "other draft lengths. A log of more steps, or one made while nothing else runs on the machine, fits better."
    )


def caveats(data: LogData, costs: LogCosts, found: Sequence[Alternative]) -> list[str]:
    """What these estimates rest on."""
    lines = [
        "Estimates, not measurements. Step costs are fitted to the recorded work and seconds; the median step is off "
        f"by {_percent(costs.error)}. Speeds are those of the fit, also for this policy, so that they compare with "
        "each other; the red line is what was measured.",
        "Acceptance is what was seen: accepted tokens, and the first rejection. Behind a draft that was accepted "
        "whole, and where nothing was drafted, the log's conditional acceptance by position stands in (behind its last "
        "position, that one's), adjusted to how often the request was rejected. Hatched: the share of tokens that "
        "rests on this. A policy that stops where it expects a rejection makes it too high, since positions far back "
        "are tested in easy places only.",
        "Steps of another policy would begin elsewhere in the text, and batches would differ. That is left out.",
    ]
    if np.unique(data.rows.proposer[data.rows.drafted > 0]).size > 1:
        lines.append("Several proposers drafted. Alternatives draft with the one used most, at the acceptance of all.")
    if not costs.plain_steps:
        source = "the start-up profile" if costs.profiled else "extrapolation to fewer rows"
        lines.append(f"The log has no step of plain decoding; its price rests on {source}.")
    if any(one.extrapolated > SPOKEN_FOR for one in found):
        lines.append(
            "Where much of a bar is hatched, it is little more than a guess; the summary does not speak of it."
        )
    return lines


def calibration_line(name: str, found: Calibration | None) -> str | None:
    """How good a prediction was."""
    if found is None:
        return None
    order = "" if found.auc is None else f" and puts accepted tokens before rejected ones with AUC {found.auc:.3f}"
    tokens = _count(int(found.count.sum()), "token")
    return f"{name} is off by {100 * found.error:.1f} points on average{order} ({tokens})."


def reasons_line(found: Counter[str]) -> str:
    """Over the table of reasons."""
    total = sum(found.values())
    without = total - found[DRAFTED]
    return f"{without:,} of {total:,} cases (a request in a step) had no draft verified."


def _mode(name: str) -> str:
    """A mode as it is called in sentences."""
    return _MODES.get(name, f"“{name}”")


def _compared(own: Alternative, other: Alternative) -> str:
    change = other.tokens_per_s / own.tokens_per_s - 1
    if abs(change) < CLEARLY:
        return f"as fast as this ({other.tokens_per_s:,.0f} against {own.tokens_per_s:,.0f} tokens/s)"
    word = "faster" if change > 0 else "slower"
    return f"{_percent(abs(change))} {word} ({other.tokens_per_s:,.0f} against {own.tokens_per_s:,.0f} tokens/s)"


def _closed(share: float) -> str:
    if share >= 1:
        return "all is reached"
    return f"{_percent(share)} is reached" if share > 0 else "none is reached"


def _percent(share: float) -> str:
    digits = 1 if 0 < share < 0.1 or 0.99 < share < 1 else 0
    return f"{100 * share:.{digits}f}\u00a0%"  # a line must not end before the sign


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
