"""``dynaspec recommend``: every policy simulated at every load, the one to configure and why, as settings to paste."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from shlex import join
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from dynaspec.control.checkpoint import checkpoint_method
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.policies.goodput import schedule_of
from dynaspec.control.policies.lengths import Range
from dynaspec.control.policies.short_names import PLAIN
from dynaspec.control.registry import build_controller
from dynaspec.hosts import check_backend
from dynaspec.hosts.vllm.launch import speculation_arguments
from dynaspec.result_output import new_table
from dynaspec.simulate.comparison import Case, compare
from dynaspec.simulate.policies import SimulatedPolicy, parse_policies
from dynaspec.simulate.traces import Trace, closed_loop
from dynaspec.version import __version__

from .evidence import Evidence
from .sentences import CLEARLY

AUTO, SCHEDULE, FIXED = "auto", "schedule", "constant:"
_EVERY_UP_TO, _STEP = 8, 4
"""Fixed lengths that are tried: all up to the first, then multiples of the second."""
_ROUNDS, _TOKENS = 3, 1024
"""So many requests, and output tokens, for each of those that run at once: at the least."""
_SEED = 0

Progress = Callable[[str, int, int], None]
MARGIN = 0.05
"""Auto is preferred while it is slower by no more: fixed lengths and schedules are judged by the very figures that they
were derived from, while auto learns its own, and goes on where load or text change."""
Choice = Literal["auto", "fixed", "schedule", "plain"]
SCHEMA = 1
"""Of the JSON document; grows when a key changes its meaning."""
_ADVICE = {
    "auto": "Configure policy auto.",
    "fixed": "Configure the fixed draft length {length}.",
    "schedule": "Configure a draft length by batch size (policy schedule).",
    "plain": "Do not speculate.",
}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Tokens a second, by policy and load."""

    loads: tuple[int, ...]
    """Requests at once."""
    speeds: Mapping[str, tuple[float, ...]]
    """Policy → one figure a load."""
    ranges: tuple[Range, ...]
    """Of ``schedule``: (smallest batch size, largest, length)."""

    @property
    def fixed(self) -> Mapping[int, tuple[float, ...]]:
        """The same by fixed length."""
        return {int(name.removeprefix(FIXED)): found for name, found in self.speeds.items() if name.startswith(FIXED)}

    def best_fixed(self, at: int) -> int:
        """The length that is fastest at a load, by its index."""
        return max(self.fixed, key=lambda k: self.fixed[k][at])

    def over_plain(self, policy: str) -> float:
        """Speed over plain decoding's: geometric mean over the loads."""
        ratios = [mine / plain for mine, plain in zip(self.speeds[policy], self.speeds[PLAIN], strict=True)]
        return float(prod(ratios) ** (1 / len(ratios)))


def predict(evidence: Evidence, loads: Sequence[int], progress: Progress) -> Predicted:
    """Closed loops of so many requests at once, under the controllers that engines run.

    Args:
        progress: told the load, and how far all of it is.

    Raises:
        ConfigError: see ``simulate``.
    """
    ranges = tuple(schedule_of(evidence.profile, evidence.longest, max(loads)))
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        evidence.profile.save(path)
        for done, load in enumerate(loads):
            progress("loads", done, len(loads))
            case = _case(evidence.trace, load)
            for plain in (True, False):
                costs = evidence.plain_costs if plain else evidence.costs
                specs = parse_policies(PLAIN, lambda: evidence.profile) if plain else _policies(evidence, ranges, path)
                for result in compare(specs, [[case]], costs, evidence.host(load)):
                    speeds.setdefault(result.name, []).append(result.totals.tokens_per_second)
        progress("loads", len(loads), len(loads))
    return Predicted(tuple(loads), {name: tuple(found) for name, found in speeds.items()}, ranges)


def lengths_up_to(longest: int) -> list[int]:
    return [k for k in range(1, longest + 1) if k <= _EVERY_UP_TO or k % _STEP == 0]


def _policies(evidence: Evidence, ranges: Sequence[Range], profile: Path) -> list[SimulatedPolicy]:
    """Those that draft."""
    names = [f"{FIXED}{k}" for k in lengths_up_to(evidence.longest)]
    fixed = [spec for spec in parse_policies(",".join(names), lambda: evidence.profile) if spec.name != PLAIN]
    told = {"num_speculative_tokens_per_batch_size": ranges}
    # Without a profile of its own an engine starts from nothing.
    warm = {} if evidence.profile_path is None else {"dynamic_config_path": str(profile)}
    return [
        *fixed,
        _named(SCHEDULE, {"num_speculative_tokens": evidence.longest, **told}),
        _named(AUTO, {"num_speculative_tokens": evidence.longest, **warm}),
    ]


def _named(policy: str, options: Mapping[str, object]) -> SimulatedPolicy:
    config = SpeculativeConfig.parse({"model": "drafter", "policy": policy, **options})
    return SimulatedPolicy(
        policy,
        lambda limits, scene: build_controller(config, limits, costs=scene.costs.pass_costs()),
    )


def _case(trace: Trace, load: int) -> Case:
    """As many of the trace's requests as a load needs to be steady, over and over."""
    count = max(_ROUNDS * load, int(np.ceil(_TOKENS * load / trace.output.mean())))
    order = np.random.default_rng(_SEED).permutation(len(trace))
    asked = trace.take(np.resize(order, count))
    return Case(_SEED, asked, closed_loop(count, load))


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


@dataclass(frozen=True, slots=True)
class Paste:
    """Something to paste, and what it is for."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Names:
    """What stands in the settings."""

    model: str
    drafter: str
    profile: Path | None
    """Warm start of ``auto``."""


def speculative_config(verdict: Verdict, names: Names, longest: int, ranges: Sequence[Range]) -> dict[str, Any] | None:
    """What every backend takes as ``speculative_config``; None = no speculation."""
    match verdict.choice:
        case "plain":
            return None
        case "fixed":
            told: Mapping[str, Any] = {"num_speculative_tokens": verdict.length}
        case "schedule":
            told = {"num_speculative_tokens_per_batch_size": [list(entry) for entry in ranges]}
        case "auto":
            warm = {} if names.profile is None else {"dynamic_config_path": str(names.profile)}
            told = {"num_speculative_tokens": longest, **warm}
    policy = "constant" if verdict.choice == "fixed" else verdict.choice
    return {"model": names.drafter, "policy": policy, **told}


def pastes(backend: str, verdict: Verdict, names: Names, longest: int, ranges: Sequence[Range]) -> list[Paste]:
    """
    Args:
        longest: draft that was measured.
        ranges: the best lengths by batch size, for a vLLM that knows nothing of dynaspec.

    Raises:
        ConfigError: an unknown backend.
    """
    check_backend(backend)
    config = speculative_config(verdict, names, longest, ranges)
    if backend == "transformers":
        return [Paste("Transformers", _generate(config, names))]
    flags = [] if config is None else ["--speculative-config", json.dumps(config)]
    if backend == "dynaspec":
        return [Paste("dynaspec", join(["dynaspec", "serve", names.model, *flags]))]
    found = [Paste("vLLM, started by dynaspec", join(["dynaspec", "serve", names.model, "--backend", "vllm", *flags]))]
    if config is None:
        return [Paste("vLLM", join(["vllm", "serve", names.model]))]
    found.append(Paste("vLLM with dynaspec's scheduler", _vllm(names, speculation_arguments(config, {}))))
    alone = _without_dynaspec(verdict, names, ranges)
    return found if alone is None else [*found, Paste("vLLM without dynaspec", _vllm(names, alone))]


def _without_dynaspec(verdict: Verdict, names: Names, ranges: Sequence[Range]) -> dict[str, Any] | None:
    """A fixed length, or vLLM's own table of lengths by batch size; None where that never drafts."""
    drafter = {"method": checkpoint_method(names.drafter), "model": names.drafter}
    if verdict.length is not None:
        return {"speculative_config": {**drafter, "num_speculative_tokens": verdict.length}}
    longest = max(k for _, _, k in ranges)
    if longest == 0:
        return None
    table = {"num_speculative_tokens_per_batch_size": [list(entry) for entry in ranges]}
    return {"speculative_config": {**drafter, "num_speculative_tokens": longest, **(table if len(ranges) > 1 else {})}}


def _vllm(names: Names, arguments: Mapping[str, Any]) -> str:
    flags = [
        part
        for name, value in arguments.items()
        for part in ("--" + name.replace("_", "-"), value if isinstance(value, str) else json.dumps(value))
    ]
    return join(["vllm", "serve", names.model, *flags])


def _generate(config: Mapping[str, Any] | None, names: Names) -> str:
    if config is None:
        return "model.generate(**inputs)"
    told = {name: value for name, value in config.items() if name != "model"}
    return "\n".join(
        (
            "from dynaspec.hosts.transformers import generate",
            "",
            f"# assistant: {names.drafter}",
            f"generate(model, **inputs, assistant_model=assistant, speculative_config={told!r})",
        )
    )


@dataclass(frozen=True, slots=True)
class Recommendation:
    """All that is said."""

    evidence: Evidence
    predicted: Predicted
    verdict: Verdict
    backend: str
    names: Names
    settings: tuple[Paste, ...]

    @property
    def advice(self) -> str:
        """The recommendation in one sentence."""
        return _ADVICE[self.verdict.choice].format(length=self.verdict.length)

    @property
    def notes(self) -> list[str]:
        """What these figures do not cover."""
        lines = []
        largest = max(self.predicted.loads)
        if largest > self.evidence.most:
            lines.append(f"nothing was measured beyond {self.evidence.most} requests at once")
        if self.evidence.limits is None:
            lines.append("a profile knows no confidences, by which auto does better where the drafter tells them")
        elif self.evidence.profile_path is None:
            lines.append("step times are fitted to the log, and lengths that it never has are extrapolated")
        return lines

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        predicted, evidence = self.predicted, self.evidence
        return {
            "schema": SCHEMA,
            "kind": "recommendation",
            "dynaspec": __version__,
            "sources": list(evidence.sources),
            "backend": self.backend,
            "recommendation": self.verdict.choice,
            "advice": self.advice,
            "num_speculative_tokens": self.verdict.length,
            "reasons": list(self.verdict.reasons),
            "notes": self.notes,
            "speculative_config": speculative_config(self.verdict, self.names, evidence.longest, predicted.ranges),
            "settings": [asdict(paste) for paste in self.settings],
            "loads": [
                {
                    "requests": load,
                    "best_fixed": predicted.best_fixed(at),
                    "tokens_per_second": {name: found[at] for name, found in predicted.speeds.items()},
                }
                for at, load in enumerate(predicted.loads)
            ],
            "num_speculative_tokens_per_batch_size": [list(entry) for entry in predicted.ranges],
        }


def recommend(
    evidence: Evidence, loads: Sequence[int], backend: str | None, names: Names, progress: Progress
) -> Recommendation:
    """
    Args:
        loads: requests at once, ascending.
        backend: what settings are for; None = where the logs come from.

    Raises:
        ConfigError: an unknown backend.
    """
    chosen = backend or evidence.backend
    check_backend(chosen)
    predicted = predict(evidence, loads, progress)
    verdict = decide(predicted)
    settings = tuple(pastes(chosen, verdict, names, evidence.longest, predicted.ranges))
    return Recommendation(evidence, predicted, verdict, chosen, names, settings)


def as_table(predicted: Predicted) -> Table:
    """One load a line: predicted tokens/s."""
    columns = ("requests at once", "plain", "best fixed", "schedule", "auto", "auto over plain")
    table = new_table("Predicted tokens/s", columns)
    for at, load in enumerate(predicted.loads):
        best = predicted.best_fixed(at)
        shown = {
            "plain": (PLAIN, ""),
            "fixed": (f"{FIXED}{best}", f" (k = {best})"),
            "schedule": (SCHEDULE, ""),
            "auto": (AUTO, ""),
        }
        fastest = max(predicted.speeds[policy][at] for policy, _ in shown.values())
        cells = [
            Text(f"{speed:.0f}{more}", style="bold green" if speed == fastest else "")
            for speed, more in ((predicted.speeds[policy][at], more) for policy, more in shown.values())
        ]
        ratio = predicted.speeds[AUTO][at] / predicted.speeds[PLAIN][at]
        table.add_row(str(load), *cells, f"{ratio:.2f}×")
    return table
