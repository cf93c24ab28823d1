"""What came of a simulation: counts and times, ratios when shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .traces import Floats, Ints

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Steps:
    """One entry a step."""

    end_s: Floats
    step_s: Floats
    requests: Ints
    """Decoding requests."""
    drafted: Ints
    verified: Ints
    accepted: Ints
    emitted: Ints
    """Tokens of decoding requests; a prompt's first token comes with its prefill."""
    drafter_passes: Ints
    draft_s: Floats
    verify_s: Floats
    prefill_rows: Ints


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One policy over one trace on one node."""

    arrival_s: Floats
    """[N]"""
    first_token_s: Floats
    finished_s: Floats
    output: Ints
    steps: Steps

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        return float(self.finished_s.max() - self.arrival_s.min())


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
            **{name: percentiles(values) for name, values in times.items()},
        }

    def _sum(self, column: str) -> int:
        return sum(int(getattr(run.steps, column).sum()) for run in self.runs)


def percentiles(values: Floats) -> dict[str, float]:
    """Mean and percentiles; empty without values."""
    if not len(values):
        return {}
    named = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
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
