"""The policies to compare: those of engines under their short names, and the oracles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dynaspec.contract.controller import Controller
from dynaspec.contract.step import Limits
from dynaspec.control.policies.short_names import PLAIN, POLICY_FORMS, Options, config_of, options_of_form, split_names
from dynaspec.control.profile import Profile
from dynaspec.control.registry import build_controller

from .costs import CostModel
from .oracle import OracleController
from .traces import Trace

ORACLES = ("oracle", "oracle:cost")
FORMS = f"{POLICY_FORMS} (goodput also without a file), oracle or oracle:cost"


@dataclass(frozen=True, slots=True)
class Scene:
    """What a controller is built for."""

    trace: Trace
    costs: CostModel
    seed: int


Build = Callable[[Limits, Scene], Controller]


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """One policy to simulate."""

    name: str
    """As it was given."""
    build: Build


def parse_policies(text: str, profile: Callable[[], Profile]) -> list[SimulatedPolicy]:
    """Policies separated by commas; plain decoding comes first, given or not.

    Args:
        profile: the profile for ``goodput`` without a file.

    Raises:
        ConfigError: an unknown form, a value out of range, or a name given twice.
    """
    return [_parse(name, profile) for name in split_names(text, FORMS)]


def _parse(name: str, profile: Callable[[], Profile]) -> SimulatedPolicy:
    if name == PLAIN:
        return SimulatedPolicy(name, lambda limits, scene: build_controller(None, limits))
    if name in ORACLES:
        return SimulatedPolicy(name, _oracle(knows_costs=name == "oracle:cost"))
    options = {"method": "draft_model", "model": "simulated"} | options_of_form(name, name, FORMS)
    needs_profile = options["policy"] == "goodput" and "dynamic_config_path" not in options
    return SimulatedPolicy(name, _production(name, options, profile() if needs_profile else None))


def _oracle(*, knows_costs: bool) -> Build:
    def build(limits: Limits, scene: Scene) -> Controller:
        costs = scene.costs if knows_costs else None
        return OracleController(scene.trace, limits, costs)

    return build


def _production(name: str, options: Options, profile: Profile | None) -> Build:
    """The controller that an engine would build. A profile that is in no file goes through one, as an engine's does."""
    config_of(name, options if profile is None else options | {"policy": "constant"})

    def build(limits: Limits, scene: Scene) -> Controller:
        if profile is None:
            return build_controller(config_of(name, options), limits, seed=scene.seed, costs=scene.costs.pass_costs())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            profile.save(path)
            config = config_of(name, options | {"dynamic_config_path": str(path)})
            return build_controller(config, limits, seed=scene.seed, costs=scene.costs.pass_costs())

    return build
