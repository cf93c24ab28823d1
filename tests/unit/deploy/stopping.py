"""How long a server may take to end, which supervisors must allow for."""

from __future__ import annotations

from dynaspec.server import run, tracing

from .options import example_server


def needed_to_stop_s() -> float:
    """Seconds from SIGTERM to the end, at most: draining, aborting, the last bytes, the last traces."""
    after_draining = run._ABORT_S + run._FLUSH_S + tracing._CLOSE_S
    return example_server().drain_timeout_s + after_draining
