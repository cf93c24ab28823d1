"""What the controller does and why, in sentences and in the few numbers behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.snapshot import EngineSnapshot

Mode = Literal["off", "idle", "plain", "speculating", "probing"]

_MODES: Mapping[object, Mode] = {
    "plain": "plain",
    "speculate": "speculating",
    "probe_plain": "probing",
    "probe_draft": "probing",
}
_WORTH_SAYING = 0.05
"""Corrections below this share are not mentioned."""
_TOKENS = ("one token", "two", "three")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is shown of it. None: the policy does not say, or there is nothing to measure."""

    mode: Mode
    headline: str
    reasons: tuple[str, ...] = ()
    plain_per_s: float | None = None
    """Tokens/s expected of plain decoding."""
    drafting_per_s: float | None = None
    """Tokens/s expected with drafts."""
    measured_per_s: float | None = None
    """Tokens per second of the latest steps that decode alone."""
    token_value_ms: float | None = None
    """What a token is worth: 1/λ."""
    thresholds: tuple[float, ...] = ()
    """After each draft token, the chance of surviving whole below which a request's draft ends."""


def explain(snapshot: EngineSnapshot, recent: SpecCounts) -> Decision:
    """What an engine decides.

    Args:
        recent: what happened in the last seconds.
    """
    if snapshot.policy == "none":
        how = "To draft, start the server with --draft-model or --speculative-config."
        return Decision(mode="off", headline="No drafter: the target writes every token itself.", reasons=(how,))
    if snapshot.proposers and not any(snapshot.proposers.values()):
        why = "Requests go on as plain decoding. The server's log names the error; a restart switches the drafter on."
        return Decision(mode="off", headline="Drafting is off: the drafter failed too often.", reasons=(why,))
    if not (snapshot.running or snapshot.waiting or recent.steps):
        how = "Send a prompt below, or point a client at this server's /v1."
        return Decision(mode="idle", headline="Idle: no request is being decoded.", reasons=(how,))
    measured = snapshot.steps.recent_goodput
    if "mode" in snapshot.estimates:
        return _weighed(_Beliefs(snapshot.estimates), measured)
    return _fixed(snapshot, recent, measured)


class _Beliefs:
    """A controller's estimates; a number that is missing or infinite is None."""

    def __init__(self, estimates: Mapping[str, Any]) -> None:
        self._estimates = estimates

    def number(self, name: str) -> float | None:
        return _number(self._estimates.get(name))

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._estimates.get(name)
        found = [_number(entry) for entry in value] if isinstance(value, list | tuple) else []
        return tuple(entry for entry in found if entry is not None)

    def corrected(self, kind: Literal["plain", "speculation"]) -> float | None:
        """Tokens/s expected, corrected by what such steps really gave."""
        expected, correction = self.number(f"{kind}_goodput"), self.number(f"{kind}_correction")
        return expected * (1.0 if correction is None else correction) if expected else None

    @property
    def mode(self) -> object:
        return self._estimates.get("mode")


def _weighed(beliefs: _Beliefs, measured: float | None) -> Decision:
    """Of ``auto``, which compares drafting with plain decoding."""
    plain, drafting, value = beliefs.corrected("plain"), beliefs.corrected("speculation"), beliefs.number("lambda")
    return Decision(
        mode=_MODES.get(beliefs.mode, "speculating"),
        headline=_headline(beliefs.mode, plain, drafting),
        reasons=tuple(_reasons(beliefs, value)),
        plain_per_s=plain,
        drafting_per_s=drafting,
        measured_per_s=measured,
        token_value_ms=1e3 / value if value else None,
        thresholds=beliefs.numbers("thresholds"),
    )


def _headline(mode: object, plain: float | None, drafting: float | None) -> str:
    if mode == "probe_plain":
        return "Trying a plain step: does drafting still pay?"
    if mode == "probe_draft":
        return "Trying short drafts: do they pay by now?"
    if mode == "plain" and drafting is None:
        return "Plain decoding: no draft is expected to pay."
    if plain is None or drafting is None:
        return "Drafting, while the first steps show what it brings."
    if mode == "plain":
        return f"Plain decoding is faster: {_rate(plain)} against {_digits(drafting)} expected with drafts."
    if drafting <= plain:
        return f"Drafting is given a chance: {_rate(drafting)} expected against {_digits(plain)} plain."
    return f"Drafting pays: {_rate(drafting)} expected against {_digits(plain)} plain."


def _reasons(beliefs: _Beliefs, value: float | None) -> list[str]:
    said = []
    if value:
        said.append(
            f"A token is worth {_ms(1.0 / value)} (λ = {_rate(value)}): each further draft token must bring "
            "in what it costs."
        )
    thresholds = beliefs.numbers("thresholds")
    if thresholds and beliefs.mode == "speculate":
        levels = ", ".join(f"{_percent(level)} after {n}" for level, n in zip(thresholds, _TOKENS, strict=False))
        said.append(f"A draft ends when the chance that all of it is accepted falls below {levels}.")
    for kind, steps in (("speculation", "Steps with drafts"), ("plain", "Plain steps")):
        correction = beliefs.number(f"{kind}_correction")
        if correction is not None and abs(correction - 1.0) >= _WORTH_SAYING:
            word = "more" if correction > 1.0 else "less"
            said.append(f"{steps} bring {_percent(abs(correction - 1.0))} {word} than predicted, which is allowed for.")
    pace = beliefs.number("pace")
    if pace is not None and abs(pace - 1.0) >= _WORTH_SAYING:
        said.append(f"Passes take {pace:.2f} times what they took at start-up.")
    return said


def _fixed(snapshot: EngineSnapshot, recent: SpecCounts, measured: float | None) -> Decision:
    """Of the other policies, which weigh nothing."""
    if not recent.drafts:
        return Decision(
            mode="plain", headline=f"The policy “{snapshot.policy}” drafts nothing now.", measured_per_s=measured
        )
    drafted, accepted = recent.draft_tokens / recent.drafts, recent.accepted / recent.drafts
    beliefs = _Beliefs(snapshot.estimates)
    acceptance, threshold = beliefs.number("acceptance"), beliefs.number("draft_confidence_threshold")
    said = []
    if acceptance is not None:
        said.append(f"It believes that {_percent(acceptance)} of the draft tokens are accepted.")
    if threshold:
        said.append(f"A draft ends where the drafter's confidence falls below {threshold:.2f}.")
    said.append("Only the policy “auto” weighs drafting against plain decoding.")
    return Decision(
        mode="speculating",
        headline=f"The policy “{snapshot.policy}” drafts {drafted:.1f} tokens at a time; {accepted:.1f} are accepted.",
        reasons=tuple(said),
        measured_per_s=measured,
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _rate(tokens_per_s: float) -> str:
    return f"{_digits(tokens_per_s)} tokens/s"


def _digits(number: float) -> str:
    return f"{number:,.{0 if number >= 10 else 1}f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}\u00a0ms"  # a line must not end before the unit


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f}\u00a0%"
