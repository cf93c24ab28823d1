"""Snapshots made up for tests."""

from __future__ import annotations

from typing import Any

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.stats import EngineSnapshot

COUNTS = SpecCounts(
    steps=40, request_steps=100, target_passes=40, drafter_passes=90, prefill_rows=321, drafts=60, draft_tokens=140,
    verified=130, accepted=80, emitted=180, draft_emitted=140, drafted_per_pos=(60, 50, 30), accepted_per_pos=(50, 30),
    proposals=70, early_exits=20, tokens_requested=300, draft_s=0.5, verify_s=1.5, step_s=2.5, kv_skipped=4,
    kv_redone=3, proposer_faults=2, preemptions=1, skipped={"policy": 7, "no_match": 2, "of a new kind": 5},
    faults={"raised": 1, "of a new kind": 1},
)  # fmt: skip


def snapshot(**values: Any) -> EngineSnapshot:
    """A busy engine unless ``values`` say otherwise."""
    busy: dict[str, Any] = {
        "counts": COUNTS,
        "running": 3,
        "waiting": 2,
        "kv_blocks": 200,
        "kv_blocks_used": 50,
        "policy": "auto",
        "longest_draft": 5,
        "prefix_cache_queries": 400,
        "prefix_cache_hits": 100,
        "estimates": {"mode": "speculate", "expected_tokens": 15.4375, "expected_step_s": 0.125},
        "proposers": {"draft_model": True, "ngram": False},
    }
    return EngineSnapshot(**busy | values)
