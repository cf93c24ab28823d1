"""Records with chosen times."""

from __future__ import annotations

from dynaspec.bench.serving.client import Failure, RequestRecord, Usage
from dynaspec.bench.serving.results import Load


def answered(start: float, chunks: list[float], tokens: int, *, prompt: int = 10, queued: float = 0.0) -> RequestRecord:
    """Sent at ``start``; its chunks came so many seconds later."""
    times = tuple(start + after for after in chunks)
    return RequestRecord(
        start_s=start,
        end_s=times[-1],
        chunks_s=times,
        usage=Usage(prompt, tokens, cached_tokens=3),
        output_tokens=tokens,
        queued_s=queued,
    )


def failed(kind: str, message: str = "no") -> RequestRecord:
    return RequestRecord(start_s=0.0, end_s=1.0, failure=Failure(kind, message))


def load(*records: RequestRecord, duration: float = 4.0) -> Load:
    return Load(records, duration_s=duration, client_cpu_s=1.0, send_lag_s=0.01)
