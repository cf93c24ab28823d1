"""Builds the controller that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynaspec.contract.controller import Controller
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Limits

from .confidence import ConfidenceController
from .config import SpeculativeConfig
from .constant import ConstantController
from .heuristic import HeuristicController
from .off_switch import OffSwitch
from .plain import PlainController
from .planner import ChainPlanner

Builder = Callable[[SpeculativeConfig, Limits], Controller]


def build_controller(config: SpeculativeConfig | None, limits: Limits, *, seed: int = 0) -> Controller:
    """The controller for ``config`` on a host with ``limits``.

    Args:
        config: None = no speculation.
        seed: for policies that explore at random; the present ones are deterministic.

    Raises:
        ConfigError: the host cannot carry out what the configuration asks for.
    """
    if config is None:
        return PlainController()
    controller = POLICIES[config.policy](config, limits)
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


def _constant(config: SpeculativeConfig, limits: Limits) -> Controller:
    return ConstantController(config.num_speculative_tokens, _planner(config, limits))


def _heuristic(config: SpeculativeConfig, limits: Limits) -> Controller:
    planner = _planner(config, limits)
    return HeuristicController(config.num_speculative_tokens, planner, carry_over=True)


def _heuristic_transient(config: SpeculativeConfig, limits: Limits) -> Controller:
    planner = _planner(config, limits)
    return HeuristicController(config.num_speculative_tokens, planner, carry_over=False)


def _confidence(config: SpeculativeConfig, limits: Limits) -> Controller:
    if not limits.can_stop:
        raise ConfigError("policy is 'confidence', but this host cannot stop between draft passes")
    for proposer in limits.proposers[:1]:
        if not proposer.has_confidence:
            raise ConfigError(f"policy is 'confidence', but the proposer {proposer.name!r} has no confidence")
    threshold = config.draft_confidence_threshold
    return ConfidenceController(
        config.num_speculative_tokens,
        _planner(config, limits),
        threshold="auto" if threshold is None else threshold,
        scope=config.draft_confidence_scope,
        signal=config.signal,
    )


POLICIES: Mapping[str, Builder] = {
    "constant": _constant,
    "heuristic": _heuristic,
    "heuristic_transient": _heuristic_transient,
    "confidence": _confidence,
}
"""One builder a policy; the names are the values of the key ``policy``."""
