"""What a policy expects: its ``estimates()`` document, read with types.

Numbers that cannot be true are left out, so that neither metrics nor the dashboard nor ``dynaspec explain`` show a
negative time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Mode = Literal["plain", "speculate", "probe_plain", "probe_draft"]
"""What a step does: plain decoding, drafting, or a probe of one of them."""
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class Probe:
    """Steps that measured the mode which was expected to be slower."""

    mode: Literal["plain", "draft"]
    steps: int
    cost_steps: float
    """Steps of the other mode that it cost; negative = it gained as much."""
    steps_ago: int
    """Since it ended."""


@dataclass(frozen=True, slots=True)
class SignalFit:
    """The chance that a draft token is accepted is σ(weight · signal + bias[position]); see ``DraftView.signal``."""

    weight: float
    bias: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProposerEstimates:
    """Of one proposer."""

    acceptance: tuple[float | None, ...] = ()
    """By position, the chance that the token is accepted if those before it were; None = not known."""
    signal: SignalFit | None = None
    cost: Mapping[str, float] = field(default_factory=dict)
    """Seconds > 0 by name, such as ``pass_s`` for one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """What the latest plan rests on. None: the controller does not say, or says what cannot be."""

    mode: Mode | None
    expected_tokens: float | None
    """Of the step, over all requests."""
    expected_step_s: float | None
    plain_goodput: float | None
    """Tokens/s expected of plain decoding, corrected by what such steps gave."""
    draft_goodput: float | None
    """The same with drafts; 0 = nothing can be drafted."""
    plain_measured_over_expected: float | None
    """What such steps gave over what was predicted; the goodputs allow for it."""
    draft_measured_over_expected: float | None
    token_price_s: float | None
    """Seconds that one more token is worth."""
    stop_below: tuple[float | None, ...]
    """After each draft token, the chance that the whole draft is accepted below which the draft ends; from 1 on it ends
    in any case."""
    speed_factor: float | None
    """Time of a step over what it took at start-up."""
    change_steps: float | None
    """Steps that changing between drafting and plain decoding costs."""
    last_probe: Probe | None
    proposers: Mapping[str, ProposerEstimates]

    @property
    def expected_goodput(self) -> float | None:
        """Tokens/s of the step."""
        if self.expected_tokens is None or self.expected_step_s is None:
            return None
        return positive(self.expected_tokens / self.expected_step_s)

    @property
    def speedup(self) -> float | None:
        """Goodput with drafts over that of plain decoding."""
        if not self.draft_goodput or self.plain_goodput is None:
            return None
        return positive(self.draft_goodput / self.plain_goodput)


def read_estimates(document: Mapping[str, Any]) -> Estimates:
    """Reads ``Explains.estimates()`` of any controller; what is missing or makes no sense is left out."""
    mode, stop_below, proposers = (document.get(name) for name in ("mode", "stop_below", "proposers"))
    draft_goodput = number(document.get("draft_goodput"))
    return Estimates(
        mode=next((known for known in MODES if known == mode), None),
        expected_tokens=positive(document.get("expected_tokens")),
        expected_step_s=positive(document.get("expected_step_s")),
        plain_goodput=positive(document.get("plain_goodput")),
        draft_goodput=draft_goodput if draft_goodput == 0.0 else positive(draft_goodput),
        plain_measured_over_expected=positive(document.get("plain_measured_over_expected")),
        draft_measured_over_expected=positive(document.get("draft_measured_over_expected")),
        token_price_s=positive(document.get("token_price_s")),
        stop_below=tuple(map(_threshold, stop_below)) if isinstance(stop_below, list | tuple) else (),
        speed_factor=positive(document.get("speed_factor")),
        change_steps=positive(document.get("change_steps")),
        last_probe=_probe(document.get("last_probe")),
        proposers={str(name): _proposer(entry) for name, entry in proposers.items() if isinstance(entry, Mapping)}
        if isinstance(proposers, Mapping)
        else {},
    )


def number(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer of some hundred digits
        return None
    return found if math.isfinite(found) else None


def positive(value: object) -> float | None:
    """A finite number above 0; None for anything else."""
    found = number(value)
    return found if found is not None and found > 0.0 else None


def chance(value: object) -> float | None:
    """A number from 0 to 1; None for anything else."""
    found = number(value)
    return found if found is not None and 0.0 <= found <= 1.0 else None


def _threshold(value: object) -> float | None:
    if value == math.inf:
        return 1.0  # nothing is as likely
    return positive(value)


def _probe(document: object) -> Probe | None:
    if not isinstance(document, Mapping):
        return None
    mode, cost = document.get("mode"), number(document.get("cost_steps"))
    steps, ago = _count(document.get("steps")), _count(document.get("steps_ago"))
    if mode not in ("plain", "draft") or not steps or ago is None or cost is None:
        return None
    return Probe(mode, steps, cost, ago)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _proposer(document: Mapping[str, Any]) -> ProposerEstimates:
    acceptance, cost = document.get("acceptance"), document.get("cost")
    costs = {str(name): positive(seconds) for name, seconds in cost.items()} if isinstance(cost, Mapping) else {}
    return ProposerEstimates(
        acceptance=tuple(map(chance, acceptance)) if isinstance(acceptance, list | tuple) else (),
        signal=_signal(document.get("signal")),
        cost={name: seconds for name, seconds in costs.items() if seconds is not None},
    )


def _signal(document: object) -> SignalFit | None:
    if not isinstance(document, Mapping):
        return None
    weight, bias = number(document.get("weight")), document.get("bias")
    found = [number(entry) for entry in bias] if isinstance(bias, list | tuple) else []
    biases = tuple(entry for entry in found if entry is not None)
    return None if weight is None or len(biases) < len(found) else SignalFit(weight, biases)
