"""What became of each request's drafts, as a dynaspec server says it in its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .records import Record


@dataclass(frozen=True, slots=True)
class Drafts:
    """Sums over requests."""

    requests: int = 0
    """Those whose answers said anything of drafts."""
    steps: int = 0
    """Target passes that gave tokens, but for those that completed a prompt."""
    drafts: int = 0
    """Steps with a draft."""
    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None without any."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a request in a target pass, with and without a draft; None without any."""
        return 1 + self.accepted / self.steps if self.steps else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "steps": self.steps,
            "drafts": self.drafts,
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_step": self.tokens_per_step,
        }


def total_drafts(records: Sequence[Record]) -> Drafts:
    """Sums over the requests that succeeded and said something."""
    told = [r.speculation for r in records if r.failure is None and r.speculation is not None]
    totals = {key: sum(_count(one, key) for one in told) for key in ("steps", "drafts", "drafted", "accepted")}
    return Drafts(len(told), **totals)


def drafts_by_category(records: Sequence[Record], categories: Sequence[str]) -> dict[str, Drafts]:
    """Category of prompts → sums; of categories in which something was said."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record, category in zip(records, categories, strict=True):
        groups[category or "all"].append(record)
    totals = {category: total_drafts(group) for category, group in sorted(groups.items())}
    return {category: drafts for category, drafts in totals.items() if drafts.requests}


def _count(speculation: Mapping[str, Any], key: str) -> int:
    value = speculation.get(key)
    return value if isinstance(value, int) else 0
