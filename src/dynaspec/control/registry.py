"""Builds the controller that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError, IntegrityError
from dynaspec.contract.step import Controller, DraftView, Ended, Limits, ProposerTraits, StepOutcome, StepView, Work

from .auto import AutoController, CachedPlan
from .auto.lengths import Target, admit
from .config import SpeculativeConfig
from .estimate.costs import row_price_s
from .planner import ChainPlanner
from .policies.confidence import ConfidenceStop
from .policies.goodput import Goodput
from .policies.lengths import Constant, Elastic, HeuristicController, LengthController, LengthPolicy, Schedule
from .policies.wrappers import KvGate, OffSwitch, PlainController
from .resolve import DEFAULT_TREE_WIDTH, TREE_KEYS, tree_key

T = TypeVar("T")
_WARM_UP_LONGEST, _WARM_UP_STEPS = 4, 8
_REJECTED: tuple[Ended, ...] = ("rejected", "rejected")


@dataclass(frozen=True, slots=True)
class ControllerHost:
    """What a controller is built for."""

    limits: Limits
    costs: PassCosts


Builder = Callable[[SpeculativeConfig, ControllerHost], Controller]


def build_controller(config: SpeculativeConfig | None, limits: Limits, *, costs: PassCosts | None = None) -> Controller:
    """The controller for ``config`` on a host with ``limits``.

    Args:
        config: None = no speculation.
        costs: passes measured at start-up, for policies that weigh costs; None = nothing is known.

    Raises:
        ConfigError: the host cannot carry out what the configuration asks for.
    """
    if config is None:
        return PlainController()
    given = tree_key({name: getattr(config, name) for name in TREE_KEYS})
    if given is not None and not limits.can_branch:
        raise ConfigError(f"{given} is set, but this host verifies chains only; expected no {given}")
    controller = POLICIES[config.policy](config, ControllerHost(limits, costs or PassCosts()))
    if config.kv_write_gating_threshold:
        if not limits.can_gate:
            raise ConfigError("kv_write_gating_threshold is set, but this host's drafter cannot leave out KV writes")
        controller = KvGate(controller, config.kv_write_gating_threshold)
    if config.disable_by_batch_size is not None:
        controller = OffSwitch(controller, config.disable_by_batch_size)
    return controller


def _planner(config: SpeculativeConfig, limits: Limits) -> ChainPlanner:
    planner = ChainPlanner(limits)
    if not 0 < planner.shortest <= config.num_speculative_tokens:
        raise ConfigError(
            f"num_speculative_tokens is {config.num_speculative_tokens} but draft lengths that can run are "
            f"{limits.draft_lens}; expected at least the shortest of them above 0"
        )
    return planner


def _by_length(config: SpeculativeConfig, host: ControllerHost, policy: LengthPolicy) -> Controller:
    tree = None if config.tree is None else (config.tree, config.most_nodes)
    return LengthController(policy, _planner(config, host.limits), _stop(config, host.limits), tree)


def _stop(config: SpeculativeConfig, limits: Limits) -> ConfidenceStop | None:
    threshold = config.draft_confidence_threshold
    if config.policy != "confidence" and not threshold:
        return None
    asked = (
        "policy is 'confidence'" if config.policy == "confidence" else f"draft_confidence_threshold is {threshold!r}"
    )
    if not limits.can_stop:
        raise ConfigError(f"{asked}, but this host cannot stop between draft passes")
    for proposer in limits.proposers[:1]:
        if not proposer.has_confidence:
            raise ConfigError(f"{asked}, but the proposer {proposer.name!r} has no confidence")
    return ConfidenceStop(
        config.longest_draft,
        threshold="auto" if threshold is None else threshold,
        scope=config.draft_confidence_scope,
        signal=config.signal,
    )


def _auto(config: SpeculativeConfig, host: ControllerHost) -> Controller:
    _planner(config, host.limits)
    load_kernels()
    controller = AutoController(
        host.limits,
        longest=config.num_speculative_tokens,
        costs=host.costs,
        warm_start=config.profile,
        tree=(config.tree_width or DEFAULT_TREE_WIDTH, config.most_nodes) if host.limits.can_branch else (1, 1),
    )
    return CachedPlan(controller, host.limits)


def _constant(config: SpeculativeConfig, host: ControllerHost) -> Controller:
    """Also ``confidence``: a constant cap, and a stop."""
    return _by_length(config, host, Constant(config.num_speculative_tokens))


def _heuristic(config: SpeculativeConfig, host: ControllerHost) -> Controller:
    planner = _planner(config, host.limits)
    carry_over = config.policy == "heuristic"
    return HeuristicController(config.num_speculative_tokens, planner, carry_over=carry_over)


def _schedule(config: SpeculativeConfig, host: ControllerHost) -> Controller:
    ranges = config.num_speculative_tokens_per_batch_size
    return _by_length(config, host, Schedule(_required("schedule", ranges), config.num_speculative_tokens))


def _goodput(config: SpeculativeConfig, host: ControllerHost) -> Controller:
    profile = _required("profile", config.profile)
    return _by_length(config, host, Goodput(profile, config.num_speculative_tokens, host.limits.draft_lens))


def _elastic(config: SpeculativeConfig, host: ControllerHost) -> Controller:
    ladder = _required("ladder", config.draft_length_options)
    if ChainPlanner(host.limits).runnable(ladder[0]) == 0:
        # At k = 0 nothing is observed: it would never come back.
        raise ConfigError(
            f"draft_length_options is {list(ladder)} but draft lengths that can run are {host.limits.draft_lens}; "
            "expected none below the shortest of them above 0"
        )
    return _by_length(config, host, Elastic(ladder))


def _required(what: str, value: T | None) -> T:
    """``SpeculativeConfig`` sees to it that what a policy needs is there."""
    if value is None:
        raise IntegrityError(f"the configuration has no {what}")
    return value


POLICIES: Mapping[str, Builder] = {
    "auto": _auto,
    "constant": _constant,
    "heuristic": _heuristic,
    "heuristic_transient": _heuristic,
    "confidence": _constant,
    "schedule": _schedule,
    "goodput": _goodput,
    "elastic": _elastic,
}
"""One builder a policy; the names are the values of the key ``policy``."""


@cache
def load_kernels() -> None:
    """Loads what is compiled, which would otherwise be taken for the cost of the first steps.

    Once a process: takes a scratch controller through steps with drafts of a model, and then of a lookup.
    """
    lookup, four = ProposerTraits("lookup", passes_per_draft="none", has_confidence=False), (4, 4)
    limits = Limits(
        draft_lens=tuple(range(_WARM_UP_LONGEST + 1)),
        proposers=(ProposerTraits("model", trees=True), lookup),
        can_branch=True,
    )
    controller = AutoController(limits, longest=_WARM_UP_LONGEST, tree=(2, _WARM_UP_LONGEST))
    lag, none = ((0, 0),) * 2, (None, None)
    for step in range(_WARM_UP_STEPS):
        match = (0, 0) if step < _WARM_UP_STEPS // 2 else (2, _WARM_UP_LONGEST)
        offers = (None, (match, (0, 0)))
        view = StepView(step, ("a", "b"), four, four, four, none, (0.0, 0.0), lag, offers, 0, 0, limits)
        plan = controller.plan(view)
        shown = tuple((0.9,) * depth for depth in plan.depth)
        controller.trim(view, plan, DraftView(plan.depth, shown, signal=shown))
        drafted, ended = plan.depth, _REJECTED
        work = Work(rows_per_pass=(2,) if any(drafted) else (), verify_rows=2 + sum(drafted), kv_tokens=8)
        counts = (plan.proposer, drafted, drafted, drafted, (0, 0), (1, 1), ended, (False, False), shown, work)
        controller.observe(StepOutcome(step, view.ids, *counts, 1e-4, 1e-3, 2e-3))
    # Chains are trimmed where that pays, which is not for certain in so few steps.
    target = Target(controller.costs.knots, controller.costs.curve, 1.0)
    row_price_s(target.knots, target.curve, target.rows, 1.0)
    admit(1.0, np.ones((1, 1)), np.ones(1, dtype=np.int64), np.zeros(1), target, 1)
