from __future__ import annotations

from dataclasses import replace

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.format import engine_line, format_table, log_line
from unit.observe.snapshots import snapshot

COUNTS = SpecCounts(
    request_steps=10, drafts=8, draft_tokens=32, verified=30, accepted=20, emitted=30, draft_emitted=28,
    drafted_per_pos=(8, 8, 8, 8), accepted_per_pos=(8, 6, 4, 2), proposals=9, early_exits=3,
    skipped={"no_match": 2, "catching_up": 1},
)  # fmt: skip


def test_the_log_line_in_the_fields_terms() -> None:
    line = log_line(COUNTS, 4.0)
    assert "Mean acceptance length: 3.50" in line
    assert "Accepted throughput: 5.00 tokens/s" in line
    assert "Drafted throughput: 8.00 tokens/s" in line
    assert "Per-position acceptance rate: 1.000, 0.750, 0.500, 0.250" in line
    assert "Avg draft acceptance rate: 62.5%" in line
    assert "Plain request-steps: 2 of 10" in line
    assert "\n" not in line


def test_nothing_drafted_shows_dashes() -> None:
    line = log_line(SpecCounts(request_steps=3), 0.0)
    assert "Mean acceptance length: -" in line
    assert "Accepted throughput: - tokens/s" in line
    assert "Avg draft acceptance rate: -" in line


def test_the_table_is_aligned_and_has_throughput_only_with_a_time() -> None:
    lines = format_table(COUNTS).splitlines()
    assert any(line.split() == ["mean", "acceptance", "length", "3.50"] for line in lines)
    assert any(line.split() == ["skipped:", "no_match", "2"] for line in lines)
    assert not any("tokens/s" in line for line in lines)
    starts = {len(line) - len(line[line.index("  ") :].lstrip()) for line in lines}
    assert len(starts) == 1
    assert any(line.split() == ["emitted", "tokens/s", "7.50"] for line in format_table(COUNTS, 4.0).splitlines())


def test_gated_writes_are_shown_where_there_are_any() -> None:
    assert "skipped / redone" not in format_table(COUNTS)
    lines = format_table(COUNTS + SpecCounts(kv_skipped=7, kv_redone=2)).splitlines()
    assert any(line.split()[-3:] == ["7", "/", "2"] for line in lines)


def test_the_engines_line_is_about_the_span() -> None:
    before = snapshot()
    now = replace(
        snapshot(prefix_cache_queries=500, prefix_cache_hits=180, running=4, waiting=0),
        counts=before.counts + SpecCounts(steps=5, prefill_rows=100),
        totals=replace(before.totals, generation_tokens=before.totals.generation_tokens + 50),
    )
    assert engine_line(before, now, 4.0) == (
        "Avg prompt throughput: 25.00 tokens/s, Avg generation throughput: 12.50 tokens/s, "
        "Running: 4 reqs, Waiting: 0 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 80.0%, "
        "Policy: auto (speculate)"
    )
    assert "Prefix cache hit rate: -" in engine_line(before, before, 4.0)
