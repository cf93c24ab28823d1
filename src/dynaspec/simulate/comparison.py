"""Policies over the same requests, on one node or a fleet of equal ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dynaspec.contract.errors import ConfigError

from .costs import CostModel
from .metrics import Run, Totals
from .policies import Scene, SimulatedPolicy
from .simulator import HostConfig, simulate
from .traces import Arrivals, Trace

Router = Literal["round_robin", "random"]


@dataclass(frozen=True, slots=True)
class Case:
    """What one node is asked in one repetition."""

    seed: int
    trace: Trace
    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """What came of one policy."""

    name: str
    totals: Totals


def spread_over_nodes(case: Case, nodes: int, router: Router, rng: np.random.Generator) -> list[Case]:
    """Sends each request of a fleet to a node; a router that knows no loads. Nodes without requests are left out.

    Raises:
        ConfigError: a closed loop, whose arrivals depend on all nodes.
    """
    if nodes == 1:
        return [case]
    if nodes < 1:
        raise ConfigError(f"nodes is {nodes}; expected at least 1")
    if len(case.arrivals.times) < len(case.trace):
        raise ConfigError("a closed loop runs on one node only; expected other arrivals, or --nodes 1")
    place = np.arange(len(case.trace)) % nodes
    if router == "random":
        place = rng.integers(0, nodes, len(case.trace))
    shares = [np.flatnonzero(place == node) for node in range(nodes)]
    return [Case(case.seed, case.trace.take(s), case.arrivals.take(s)) for s in shares if s.size]


def compare(
    policies: Sequence[SimulatedPolicy],
    cases: Sequence[Sequence[Case]],
    costs: CostModel,
    host: HostConfig,
    *,
    time_noise: float = 0.0,
    tell: Callable[[str], None] = lambda message: None,
) -> list[PolicyResult]:
    """Every policy serves every case.

    Args:
        cases: for each seed, its nodes.
        tell: told what runs.
    """
    results = []
    for policy in policies:
        tell(policy.name)
        by_seed = tuple(tuple(_serve(policy, case, costs, host, time_noise) for case in nodes) for nodes in cases)
        results.append(PolicyResult(policy.name, Totals(by_seed)))
    return results


def _serve(policy: SimulatedPolicy, case: Case, costs: CostModel, host: HostConfig, time_noise: float) -> Run:
    scene = Scene(case.trace, costs, case.seed)
    return simulate(
        case.trace,
        case.arrivals,
        costs,
        lambda limits: policy.build(limits, scene),
        host,
        time_noise=time_noise,
        rng=np.random.default_rng(case.seed),
    )
