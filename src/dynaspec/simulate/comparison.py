"""Several policies on the same traces, arrivals and costs: run, summed up, and as a table and JSON."""

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
from .policies import ORACLES, Scene, SimulatedPolicy
from .simulator import HostConfig, SimulatedRun, simulate
from .traces import Arrivals, Floats, Trace

Router = Literal["round_robin", "random"]
SCHEMA = 1
"""Of the JSON file; grows when a key changes its meaning."""
_PERCENTILES = (50, 90, 99)
_COLUMNS = ("policy", "tokens/s", "× plain", "ms/token", "p99", "TTFT p99", "k", "length", "wasted", "passes")


@dataclass(frozen=True, slots=True)
class Case:
    """What one node is asked in one repetition."""

    seed: int
    trace: Trace
    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class Totals:
    """Runs of one policy together: nodes of a fleet that work at the same time, and the same again for each seed."""

    by_seed: tuple[tuple[SimulatedRun, ...], ...]
    """For each seed, its nodes."""

    @property
    def runs(self) -> tuple[SimulatedRun, ...]:
        return tuple(run for nodes in self.by_seed for run in nodes)

    @property
    def requests(self) -> int:
        return sum(len(run.output) for run in self.runs)

    @property
    def tokens(self) -> int:
        return sum(int(run.output.sum()) for run in self.runs)

    @property
    def seconds(self) -> float:
        """Until the last node is done, over all seeds."""
        return sum(max(run.seconds for run in nodes) for nodes in self.by_seed)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_second_by_seed(self) -> tuple[float, ...]:
        return tuple(Totals((nodes,)).tokens_per_second for nodes in self.by_seed)

    @property
    def target_passes(self) -> int:
        return sum(len(run.steps.step_s) for run in self.runs)

    @property
    def drafter_passes(self) -> int:
        return self._sum("drafter_passes")

    @property
    def drafted(self) -> int:
        return self._sum("drafted")

    @property
    def accepted(self) -> int:
        return self._sum("accepted")

    @property
    def wasted(self) -> float:
        """Drafted tokens that did not become output, for each token of output."""
        return (self.drafted - self.accepted) / self.tokens

    @property
    def request_steps(self) -> int:
        """Σ over steps of the requests that decode."""
        return self._sum("requests")

    @property
    def mean_k(self) -> float:
        """Tokens drafted for a request in a step."""
        return self.drafted / max(1, self.request_steps)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted for a request in a step, the target's own included."""
        return self._sum("emitted") / max(1, self.request_steps)

    @property
    def mean_batch(self) -> float:
        """Requests that decode, over time."""
        weighted = sum(float((run.steps.requests * run.steps.step_s).sum()) for run in self.runs)
        return weighted / max(1e-12, sum(float(run.steps.step_s.sum()) for run in self.runs))

    def latency_s(self) -> Floats:
        """[requests] from arrival to the last token."""
        return np.concatenate([run.finished_s - run.arrival_s for run in self.runs])

    def first_token_s(self) -> Floats:
        """[requests] from arrival to the first token."""
        return np.concatenate([run.first_token_s - run.arrival_s for run in self.runs])

    def per_token_s(self) -> Floats:
        """[requests with more than one token] time per output token behind the first."""
        values = [
            (run.finished_s - run.first_token_s)[run.output > 1] / (run.output[run.output > 1] - 1) for run in self.runs
        ]
        return np.concatenate(values)

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        times = {
            "latency_s": self.latency_s(),
            "time_to_first_token_s": self.first_token_s(),
            "time_per_output_token_s": self.per_token_s(),
        }
        return {
            "requests": self.requests,
            "output_tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_by_seed": list(self.tokens_per_second_by_seed),
            "mean_k": self.mean_k,
            "acceptance_length": self.acceptance_length,
            "mean_batch": self.mean_batch,
            "target_passes": self.target_passes,
            "drafter_passes": self.drafter_passes,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "wasted_per_output_token": self.wasted,
            "draft_s": sum(float(run.steps.draft_s.sum()) for run in self.runs),
            "verify_s": sum(float(run.steps.verify_s.sum()) for run in self.runs),
            **{name: _percentiles(values) for name, values in times.items()},
        }

    def _sum(self, column: str) -> int:
        return sum(int(getattr(run.steps, column).sum()) for run in self.runs)


def _percentiles(values: Floats) -> dict[str, float]:
    """Mean and percentiles; empty without values."""
    if not len(values):
        return {}
    named = {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES}
    return {"mean": float(values.mean()), **named}


@dataclass(frozen=True, slots=True)
class Course:
    """How a policy fares over time, in equal spans; all nodes and seeds together."""

    at_s: Floats
    """[bins] the spans' middles."""
    draft_length: Floats
    """[bins] tokens drafted for a request in a step; NaN where nobody decoded."""
    requests: Floats
    """[bins] decoding requests of a node."""


def course(totals: Totals, bins: int = 60) -> Course:
    """Steps count where they end."""
    edges = np.linspace(0.0, max(float(run.steps.end_s[-1]) for run in totals.runs), bins + 1)
    drafted, request_steps, request_s = np.zeros(bins), np.zeros(bins), np.zeros(bins)
    for run in totals.runs:
        steps = run.steps
        where = np.clip(np.searchsorted(edges, steps.end_s) - 1, 0, bins - 1)
        np.add.at(drafted, where, steps.drafted)
        np.add.at(request_steps, where, steps.requests)
        np.add.at(request_s, where, steps.requests * steps.step_s)
    length = np.full(bins, np.nan)
    np.divide(drafted, request_steps, out=length, where=request_steps > 0)
    return Course(
        at_s=(edges[:-1] + edges[1:]) / 2,
        draft_length=length,
        requests=request_s / (edges[1] * len(totals.runs)),
    )


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
