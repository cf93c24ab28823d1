"""Why requests were not drafted for."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .data import UNKNOWN, Flags, LogData

DRAFTED = "drafted for"
NO_ROOM = "no room: its last token, or the end of the model's context"
REQUESTED_OFF = "the request asked for no speculation"
POLICY = "the policy chose plain decoding"
HOST = "granted by the policy, taken back by the host (no KV blocks, or no proposer)"
NOTHING = "granted, but the proposer had nothing (no match, still catching up, or a fault)"
TRIMMED = "drafted, but all of it was trimmed before verification"


def reasons(data: LogData) -> Counter[str]:
    """Request-steps by what became of their draft."""
    rows = data.rows
    left = np.ones(rows.step.size, dtype=np.bool_)
    found: Counter[str] = Counter()

    def take(name: str, which: Flags) -> None:
        found[name] += int((which & left).sum())
        left[which] = False

    take(DRAFTED, rows.verified > 0)
    take(TRIMMED, rows.drafted > 0)
    take(NOTHING, rows.granted > 0)
    take(REQUESTED_OFF, rows.wish == 0)
    take(NO_ROOM, rows.room == 0)
    take(HOST, rows.planned > 0)
    for step in rows.step[left & (rows.planned != UNKNOWN)]:
        said = data.reasons[step]
        found[f"{POLICY}: {said}" if said else POLICY] += 1
    found["not known"] += int((left & (rows.planned == UNKNOWN)).sum())
    return +found
