"""The policies to compare: those of engines under their short names, and the oracles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dynaspec.contract.step import Controller, DraftView, Limits, SpecPlan, StepOutcome, StepView
from dynaspec.control.policies.short_names import PLAIN, POLICY_FORMS, Options, config_of, options_of_form, split_names
from dynaspec.control.profile import Profile
from dynaspec.control.registry import build_controller

from .costs import CostModel, PrefillChunk, step_load
from .traces import Ints, Trace

ORACLES = ("oracle", "oracle:cost")
FORMS = f"{POLICY_FORMS} (goodput also without a file), oracle or oracle:cost"


class OracleController:
    """Drafts exactly to the first token that would be rejected; that one is the target's own.

    With ``costs`` it drafts only what pays: no request further than the K ≥ 0 that gives the step the most tokens a
    second, and none whose drafter would have to catch up on more than it then gains. With one request and a drafter
    pass cheaper than a target pass both are the same, and no policy can be faster; with many, each step is the best
    single step, and a policy that happens to end requests in a better order can come out ahead by a little.

    Args:
        trace: the one that is simulated; requests are named ``r0``, ``r1``, … by their place in it.
        costs: those of the simulation; None = draft whatever will be accepted.
    """

    def __init__(self, trace: Trace, limits: Limits, costs: CostModel | None = None) -> None:
        self._trace = trace
        self._limits = limits
        self._costs = costs
        self._catch_up_row_s = 0.0 if costs is None else self._ingested_row_s(costs)

    def plan(self, view: StepView) -> SpecPlan:
        requests = np.array([int(name[1:]) for name in view.ids], dtype=np.int64)
        context = np.array(view.context_len, dtype=np.int64)
        at = self._trace.first[requests] + context - self._trace.prompt[requests]
        # The bonus behind a whole run is the target's: of a run to the request's end the last token needs no draft.
        end = self._trace.first[requests] + self._trace.output[requests]
        wanted = np.minimum(self._trace.runs[at], end - at - 1)
        room = np.minimum(np.array(view.room_depth, dtype=np.int64), self._limits.draft_lens[-1])
        depth = np.minimum(wanted, room)
        if self._costs is not None and depth.any():
            depth = self._what_pays(self._costs, view, context, depth, end - at)
        lens = tuple(depth.tolist())
        return SpecPlan(step=view.step, depth=lens, proposer=(0,) * len(lens), nodes=lens)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return plan if drafts.length == plan.depth else plan.with_depth(drafts.length)

    def observe(self, outcome: StepOutcome) -> None:
        """Knows everything already."""

    def forget(self, ids: Sequence[str]) -> None:
        """Nothing was kept."""

    def _what_pays(self, costs: CostModel, view: StepView, context: Ints, depth: Ints, left: Ints) -> Ints:
        """The lengths with the most tokens − λ · seconds, where λ, the tokens that a second costs, is the best goodput.

        A prompt's rows slow a step whatever is drafted: held against goodput, they would make every draft look cheap,
        so λ is that of a step without. What its drafter must catch up on, a request takes in once for all that
        follows: it only starts if the share that falls on this step's tokens is less than what they gain.
        """
        caps = [np.minimum(depth, cap) for cap in range(int(depth.max()) + 1)]
        tokens = np.array([float(lens.sum() + len(lens)) for lens in caps])
        alone = np.array([self._seconds(costs, context, lens, 0) for lens in caps])
        price = float((tokens / alone).max())
        # Of each drafted token, what is left when its pass and its row are paid for.
        drafted = np.maximum(tokens - len(depth), 1.0)
        net = np.maximum(1.0 - price * (alone - alone[0]) / drafted, 0.0)
        behind_s = self._catch_up_row_s * np.array(view.lag[0], dtype=np.int64)
        lens = [
            np.where(cap * gain >= price * behind_s * (cap + 1) / left, cap, 0)
            for cap, gain in zip(caps, net, strict=True)
        ]
        emitted = np.array([float(each.sum() + len(each)) for each in lens])
        seconds = np.array([self._seconds(costs, context, each, view.prefill_tokens) for each in lens])
        return lens[int(np.argmax(emitted - price * seconds))]

    def _seconds(self, costs: CostModel, context: Ints, drafted: Ints, prefill_tokens: int) -> float:
        chunks = (PrefillChunk(0, prefill_tokens),) if prefill_tokens else ()
        ingested = np.minimum(drafted, 1)
        return costs.time(step_load(self._limits.proposers[0], context, drafted, drafted, ingested, chunks)).step_s

    def _ingested_row_s(self, costs: CostModel) -> float:
        """What one more committed token costs a drafter's first pass, where it takes in many."""
        one = np.ones(1, dtype=np.int64)
        few, many = (
            costs.time(step_load(self._limits.proposers[0], one, one, one, one * rows)).step_s for rows in (1024, 2048)
        )
        return (many - few) / 1024


@dataclass(frozen=True, slots=True)
class Scene:
    """What a controller is built for."""

    trace: Trace
    costs: CostModel


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
            return build_controller(config_of(name, options), limits, costs=scene.costs.pass_costs())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            profile.save(path)
            config = config_of(name, options | {"dynamic_config_path": str(path)})
            return build_controller(config, limits, costs=scene.costs.pass_costs())

    return build
