"""What answers say of drafts."""

from __future__ import annotations

from dynaspec.contract.outputs import RequestMetrics
from dynaspec.contract.sampling_params import SpeculationMetrics

from .protocol.speculation import SpeculationReport


def report(metrics: RequestMetrics, level: SpeculationMetrics) -> SpeculationReport | None:
    """What became of a continuation's drafts; None for ``off``."""
    if level == "off":
        return None
    detailed = level == "detailed"
    return SpeculationReport(
        steps=metrics.steps,
        drafts=metrics.drafts,
        drafted=metrics.drafted,
        verified=metrics.verified,
        accepted=metrics.accepted,
        mean_acceptance_length=metrics.mean_acceptance_length,
        draft_acceptance_rate=metrics.draft_acceptance_rate,
        drafted_per_pos=metrics.drafted_per_pos if detailed else None,
        accepted_per_pos=metrics.accepted_per_pos if detailed else None,
        per_step=metrics.per_step if detailed else None,
    )
