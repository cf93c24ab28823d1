"""Every policy at every load, simulated."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.goodput import schedule_of
from dynaspec.control.registry import build_controller
from dynaspec.control.schedule import Range
from dynaspec.simulate.arrivals import closed_loop
from dynaspec.simulate.comparison import Case, compare
from dynaspec.simulate.policies import PLAIN, PolicySpec, parse_policies
from dynaspec.simulate.traces import Trace

from .evidence import Evidence

AUTO, SCHEDULE, FIXED = "auto", "schedule", "constant:"
_EVERY_UP_TO, _STEP = 8, 4
"""Fixed lengths that are tried: all up to the first, then multiples of the second."""
_ROUNDS, _TOKENS = 3, 1024
"""So many requests, and output tokens, for each of those that run at once: at the least."""
_SEED = 0

Progress = Callable[[str, int, int], None]


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


def _policies(evidence: Evidence, ranges: Sequence[Range], profile: Path) -> list[PolicySpec]:
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


def _named(policy: str, options: Mapping[str, object]) -> PolicySpec:
    config = SpeculativeConfig.parse({"model": "drafter", "policy": policy, **options})
    return PolicySpec(
        policy,
        lambda limits, scene: build_controller(config, limits, seed=scene.seed, costs=scene.costs.pass_costs()),
    )


def _case(trace: Trace, load: int) -> Case:
    """As many of the trace's requests as a load needs to be steady, over and over."""
    count = max(_ROUNDS * load, int(np.ceil(_TOKENS * load / trace.output.mean())))
    order = np.random.default_rng(_SEED).permutation(len(trace))
    asked = trace.take(np.resize(order, count))
    return Case(_SEED, asked, closed_loop(count, load))
