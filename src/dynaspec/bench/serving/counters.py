"""A server's own counts of speculation, read from ``/metrics`` before and after a load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

NAMESPACES = ("dynaspec", "vllm")
"""Prefixes of metrics' names, in order of preference."""
_NAMES: Mapping[str, str] = {
    "spec_decode_num_drafts_total": "drafts",
    "spec_decode_num_draft_tokens_total": "draft_tokens",
    "spec_decode_num_accepted_tokens_total": "accepted_tokens",
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """Totals over all engines of a server."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: Mapping[int, int] = field(default_factory=dict)

    def __sub__(self, before: SpecCounters) -> SpecCounters:
        positions = sorted({*self.accepted_per_position, *before.accepted_per_position})
        return SpecCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            {
                position: self.accepted_per_position.get(position, 0) - before.accepted_per_position.get(position, 0)
                for position in positions
            },
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None without any."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a step with a draft emits: 1 + accepted tokens per draft; None without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def rates_per_position(self) -> list[float]:
        """Share of the drafts whose token at each position was accepted."""
        if not self.drafts:
            return []
        return [accepted / self.drafts for _, accepted in sorted(self.accepted_per_position.items())]


def read_counters(text: str) -> SpecCounters | None:
    """The counters in a page of Prometheus's text format; None if it has none, or is of another format."""
    totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    positions: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return None
    for sample in samples:
        namespace, _, name = sample.name.partition(":")
        if name in _NAMES:
            totals[namespace][_NAMES[name]] += sample.value
        elif name == _PER_POSITION and sample.labels.get("position", "").isdigit():
            positions[namespace][int(sample.labels["position"])] += sample.value
    for namespace in NAMESPACES:
        if namespace in totals:
            whole = {name: int(value) for name, value in totals[namespace].items()}
            accepted = {position: int(value) for position, value in positions[namespace].items()}
            return SpecCounters(**whole, accepted_per_position=accepted)
    return None
