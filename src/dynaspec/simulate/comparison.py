"""Several policies on the same traces, arrivals and costs: run, and as a table and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from dynaspec.contract.errors import ConfigError
from dynaspec.control.policies.short_names import PLAIN
from dynaspec.result_output import new_table
from dynaspec.version import __version__

from .costs import CostModel
from .metrics import SimulatedRun, Totals
from .policies import ORACLES, Scene, SimulatedPolicy
from .simulator import HostConfig, simulate
from .traces import Arrivals, Trace

Router = Literal["round_robin", "random"]
SCHEMA = 1
"""Of the JSON file; grows when a key changes its meaning."""
_COLUMNS = ("policy", "tokens/s", "× plain", "ms/token", "p99", "TTFT p99", "k", "length", "wasted", "passes")


@dataclass(frozen=True, slots=True)
class Case:
    """What one node is asked in one repetition."""

    seed: int
    trace: Trace
    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class SimulatedResult:
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
) -> list[SimulatedResult]:
    """Every policy serves every case.

    Args:
        cases: for each seed, its nodes.
        tell: told what runs.
    """
    results = []
    for policy in policies:
        tell(policy.name)
        by_seed = tuple(tuple(_serve(policy, case, costs, host, time_noise) for case in nodes) for nodes in cases)
        results.append(SimulatedResult(policy.name, Totals(by_seed)))
    return results


def _serve(policy: SimulatedPolicy, case: Case, costs: CostModel, host: HostConfig, time_noise: float) -> SimulatedRun:
    scene = Scene(case.trace, costs)
    return simulate(
        case.trace,
        case.arrivals,
        costs,
        lambda limits: policy.build(limits, scene),
        host,
        time_noise=time_noise,
        rng=np.random.default_rng(case.seed),
    )


def as_table(results: Sequence[SimulatedResult], title: str) -> Table:
    """One policy a line.

    Output tokens a second and their ratio to plain decoding; time per output token of the median request and of the
    99th percentile; the same percentile of the time to the first token; tokens drafted for a request in a step, and
    emitted; drafts wasted per token of output; target and drafter passes.
    """
    table = new_table(title, _COLUMNS, left=("policy",))
    plain = next(result.totals for result in results if result.name == PLAIN)
    real = [result.totals.tokens_per_second for result in results if result.name not in ORACLES]
    for result in results:
        totals = result.totals
        style = "dim" if result.name in ORACLES else "bold green" if totals.tokens_per_second == max(real) else ""
        per_token = 1e3 * totals.per_token_s()
        table.add_row(
            Text(result.name, style=style),
            Text(f"{totals.tokens_per_second:.0f}", style=style),
            Text(f"{totals.tokens_per_second / plain.tokens_per_second:.2f}", style=style),
            _percentile(per_token, 50, ".2f"),
            _percentile(per_token, 99, ".2f"),
            _percentile(totals.first_token_s(), 99, ".2f") + " s",
            f"{totals.mean_k:.2f}",
            f"{totals.acceptance_length:.2f}",
            f"{totals.wasted:.2f}",
            f"{totals.target_passes} / {totals.drafter_passes}",
        )
    return table


def document(results: Sequence[SimulatedResult], options: Mapping[str, Any], costs: str) -> dict[str, Any]:
    """Everything simulated, as plain JSON values."""
    return {
        "schema": SCHEMA,
        "kind": "simulation",
        "dynaspec": __version__,
        "costs": costs,
        "options": dict(options),
        "policies": {result.name: result.totals.document() for result in results},
    }


def _percentile(values: np.ndarray[Any, Any], percent: int, form: str) -> str:
    return format(float(np.percentile(values, percent)), form) if len(values) else "-"
