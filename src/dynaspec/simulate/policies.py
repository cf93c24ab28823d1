"""Short names for the policies to compare, as ``dynaspec bench`` has them, and the oracles beside."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaspec.contract.controller import Controller
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Limits
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.profile import Profile
from dynaspec.control.registry import build_controller

from .costs import CostModel
from .oracle import OracleController
from .traces import Trace

PLAIN = "plain"
ORACLES = ("oracle", "oracle:cost")
FORMS = (
    "plain, constant:K, heuristic[:K], heuristic_transient[:K], confidence[:T[:K[:SCOPE]]], "
    "schedule:LO-HI=K[/LO-HI=K …], goodput[:FILE[:K]], elastic[:K-K-K], auto[:K], oracle or oracle:cost"
)

Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a controller is built for."""

    trace: Trace
    costs: CostModel
    seed: int


Build = Callable[[Limits, Scene], Controller]


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One policy to simulate."""

    name: str
    """As it was given."""
    build: Build


def parse_policies(text: str, profile: Callable[[], Profile]) -> list[PolicySpec]:
    """Policies separated by commas; plain decoding comes first, given or not.

    Args:
        profile: the profile for ``goodput`` without a file.

    Raises:
        ConfigError: an unknown form, a value out of range, or a name given twice.
    """
    names = [name for part in text.split(",") if (name := part.strip())]
    if not names:
        raise ConfigError(f"policies is {text!r}; expected {FORMS}")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"the policy {twice[0]!r} is given twice; expected each once")
    return [_parse(name, profile) for name in (PLAIN, *(name for name in names if name != PLAIN))]


def _parse(name: str, profile: Callable[[], Profile]) -> PolicySpec:
    if name == PLAIN:
        return PolicySpec(name, lambda limits, scene: build_controller(None, limits))
    if name in ORACLES:
        return PolicySpec(name, _oracle(knows_costs=name == "oracle:cost"))
    policy, *arguments = name.split(":")
    if policy not in _READERS:
        raise ConfigError(f"the policy {name!r} is not known; expected {FORMS}")
    options = {"method": "draft_model", "model": "simulated", "policy": policy} | _READERS[policy](name, arguments)
    needs_profile = policy == "goodput" and "dynamic_config_path" not in options
    return PolicySpec(name, _production(name, options, profile() if needs_profile else None))


def _oracle(*, knows_costs: bool) -> Build:
    def build(limits: Limits, scene: Scene) -> Controller:
        costs = scene.costs if knows_costs else None
        return OracleController(scene.trace, limits, costs)

    return build


def _production(name: str, options: Options, profile: Profile | None) -> Build:
    """The controller that an engine would build. A profile that is in no file goes through one, as an engine's does."""
    _parsed(name, options if profile is None else options | {"policy": "constant"})

    def build(limits: Limits, scene: Scene) -> Controller:
        if profile is None:
            return build_controller(_parsed(name, options), limits, seed=scene.seed, costs=scene.costs.pass_costs())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            profile.save(path)
            config = _parsed(name, options | {"dynamic_config_path": str(path)})
            return build_controller(config, limits, seed=scene.seed, costs=scene.costs.pass_costs())

    return build


def _parsed(name: str, options: Options) -> SpeculativeConfig | None:
    try:
        return SpeculativeConfig.parse(options)
    except ConfigError as error:
        raise ConfigError(f"the policy {name!r}: {error}") from None


def _constant(name: str, values: Sequence[str]) -> Options:
    _at_most(name, values, 1, least=1)
    return {"num_speculative_tokens": _integer(name, values[0])}


def _first_is_length(name: str, values: Sequence[str]) -> Options:
    _at_most(name, values, 1)
    return {"num_speculative_tokens": _integer(name, values[0])} if values else {}


def _confidence(name: str, values: Sequence[str]) -> Options:
    _at_most(name, values, 3)
    options: Options = {"draft_confidence_threshold": "auto"}
    if values:
        options["draft_confidence_threshold"] = _threshold(name, values[0])
    if len(values) == 3:
        options["draft_confidence_scope"] = values[2]
    return options | _first_is_length(name, values[1:2])


def _schedule(name: str, values: Sequence[str]) -> Options:
    _at_most(name, values, 1, least=1)
    ranges = [_range(name, part) for part in values[0].split("/")]
    longest = max(k for _, _, k in ranges)
    return {"num_speculative_tokens_per_batch_size": ranges, "num_speculative_tokens": max(1, longest)}


def _goodput(name: str, values: Sequence[str]) -> Options:
    _at_most(name, values, 2)
    options: Options = {"dynamic_config_path": values[0]} if values else {}
    return options | _first_is_length(name, values[1:])


def _elastic(name: str, values: Sequence[str]) -> Options:
    _at_most(name, values, 1)
    return {"draft_length_options": [_integer(name, part) for part in values[0].split("-")]} if values else {}


_READERS: Mapping[str, Callable[[str, Sequence[str]], Options]] = {
    "constant": _constant,
    "heuristic": _first_is_length,
    "heuristic_transient": _first_is_length,
    "confidence": _confidence,
    "schedule": _schedule,
    "goodput": _goodput,
    "elastic": _elastic,
    "auto": _first_is_length,
}


def _at_most(name: str, values: Sequence[str], most: int, *, least: int = 0) -> None:
    if not least <= len(values) <= most or not all(values):
        raise ConfigError(f"the policy {name!r} has {len(values)} values; expected {FORMS}")


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the policy {name!r} has the value {text!r}; expected an integer") from None


def _threshold(name: str, text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"the policy {name!r} has the value {text!r}; expected a number or auto") from None


def _range(name: str, text: str) -> list[int]:
    sizes, equals, k = text.partition("=")
    low, dash, high = sizes.partition("-")
    if not equals or not dash:
        raise ConfigError(f"the policy {name!r} has the range {text!r}; expected LO-HI=K")
    return [_integer(name, part) for part in (low, high, k)]
