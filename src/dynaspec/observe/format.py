"""Statistics as text, in vLLM's terms: tables, and lines of the log about an engine every few seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .counts import SpecCounts
from .stats import EngineSnapshot

logger = logging.getLogger(__name__)


def engine_line(before: EngineSnapshot, now: EngineSnapshot, elapsed_s: float) -> str:
    """One line about load and throughput between two snapshots ``elapsed_s`` seconds apart."""
    prompt_tokens = now.counts.prefill_rows - before.counts.prefill_rows
    generated = now.totals.generation_tokens - before.totals.generation_tokens
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    mode = now.estimates.get("mode")
    return (
        f"Avg prompt throughput: {_per_second(prompt_tokens, elapsed_s)} tokens/s, "
        f"Avg generation throughput: {_per_second(generated, elapsed_s)} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
        f"KV cache usage: {_percent(now.kv_blocks_used / now.kv_blocks)}, "
        f"Prefix cache hit rate: {_percent(hits / queries if queries else None)}, "
        f"Policy: {now.policy}{f' ({mode})' if mode else ''}"
    )


def log_line(counts: SpecCounts, elapsed_s: float) -> str:
    """One line about a span of ``elapsed_s`` seconds."""
    return (
        f"Mean acceptance length: {number_text(counts.mean_acceptance_length)}, "
        f"Accepted throughput: {_per_second(counts.accepted, elapsed_s)} tokens/s, "
        f"Drafted throughput: {_per_second(counts.draft_tokens, elapsed_s)} tokens/s, "
        f"Accepted: {counts.accepted} tokens, Drafted: {counts.draft_tokens} tokens, "
        f"Per-position acceptance rate: {_rates(counts)}, "
        f"Avg draft acceptance rate: {_percent(counts.draft_acceptance_rate)}, "
        f"Plain request-steps: {counts.request_steps - counts.drafts} of {counts.request_steps}"
    )


def format_table(counts: SpecCounts, elapsed_s: float | None = None) -> str:
    """Two columns, one quantity a line.

    Args:
        elapsed_s: the span's wall time; None leaves the throughputs out.
    """
    rows = [
        ("mean acceptance length", number_text(counts.mean_acceptance_length)),
        ("draft acceptance rate", _percent(counts.draft_acceptance_rate)),
        ("acceptance rate per position", _rates(counts)),
        ("drafts", str(counts.drafts)),
        ("drafted / verified / accepted", f"{counts.draft_tokens} / {counts.verified} / {counts.accepted}"),
        ("early exits / proposals", f"{counts.early_exits} / {counts.proposals}"),
        ("tokens emitted", str(counts.emitted)),
        ("tokens per request and step", number_text(counts.tokens_per_request_step)),
        ("target / drafter passes", f"{counts.target_passes} / {counts.drafter_passes}"),
        (
            "draft / verify / step time",
            f"{counts.draft_s:.3f} / {counts.verify_s:.3f} / {counts.step_s:.3f} s",
        ),
        ("preemptions / proposer faults", f"{counts.preemptions} / {counts.proposer_faults}"),
    ]
    if counts.kv_skipped:
        rows.append(("drafter KV writes skipped / redone", f"{counts.kv_skipped} / {counts.kv_redone}"))
    if elapsed_s is not None:
        rows.append(("accepted tokens/s", _per_second(counts.accepted, elapsed_s)))
        rows.append(("drafted tokens/s", _per_second(counts.draft_tokens, elapsed_s)))
        rows.append(("emitted tokens/s", _per_second(counts.emitted, elapsed_s)))
    rows.extend((f"skipped: {reason}", str(count)) for reason, count in sorted(counts.skipped.items()))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def number_text(value: float | None) -> str:
    """Two decimals; a dash for None."""
    return "-" if value is None else f"{value:.2f}"


def duration_text(seconds: float) -> str:
    """In the unit that suits it; a line does not end before the unit."""
    if seconds >= 1.0:
        return f"{seconds:,.{0 if seconds >= 100.0 else 1}f}\u00a0s"
    return f"{1e3 * seconds:.3g}\u00a0ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g}\u00a0µs"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _rates(counts: SpecCounts) -> str:
    return ", ".join(f"{rate:.3f}" for rate in counts.rate_per_position) or "-"


def _per_second(count: int, elapsed_s: float) -> str:
    return f"{count / elapsed_s:.2f}" if elapsed_s > 0 else "-"


class PeriodicLog:
    """Logs what happened since the previous lines, at most once every ``interval_s`` seconds.

    It has no clock: the caller says what time it is. Spans without a step are passed over.
    """

    def __init__(self, take: Callable[[], EngineSnapshot], interval_s: float = 10.0) -> None:
        """
        Args:
            take: tells what the engine is doing; called when lines are due only.
        """
        self._take = take
        self._interval_s = interval_s
        self._since: float | None = None
        self._before = take()

    def tick(self, now: float) -> bool:
        """Logs if lines are due.

        Args:
            now: monotonic seconds; the first call starts the first span.

        Returns:
            Whether anything was logged.
        """
        if self._since is None:
            self._since = now
            return False
        elapsed = now - self._since
        if elapsed < self._interval_s:
            return False
        before, current = self._before, self._take()
        self._since, self._before = now, current
        counts = current.counts - before.counts
        if counts.steps == 0:
            return False
        logger.info("Engine: %s", engine_line(before, current, elapsed))
        if current.policy != "none" and counts.request_steps:
            logger.info("Speculation: %s", log_line(counts, elapsed))
        return True
