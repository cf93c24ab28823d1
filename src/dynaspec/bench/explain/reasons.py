"""Why steps drafted or did not, and why requests were not drafted for."""

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
_NOT_YET = ", but that was not confirmed yet, or too little to repay the change"


def step_reason(data: LogData, step: int) -> str:
    """Why the controller chose what it did in a step: in its own words, else by its expectations; empty = not known."""
    mode, plain, drafting = data.modes[step], data.steps.plain_goodput[step], data.steps.draft_goodput[step]
    if data.reasons[step]:
        return data.reasons[step]
    if mode == "plain" and drafting == 0.0:
        return "nothing could be drafted"
    if mode not in ("plain", "speculate") or np.isnan(plain) or np.isnan(drafting):
        return ""
    if drafting > plain:
        late = "" if mode == "speculate" else _NOT_YET
        return f"drafting was expected to be faster{late}"
    late = "" if mode == "plain" else _NOT_YET
    return f"plain decoding was expected to be faster{late}"


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
        why = _why_plain(data, int(step))
        found[f"{POLICY}: {why}" if why else POLICY] += 1
    found["not known"] += int((left & (rows.planned == UNKNOWN)).sum())
    return +found


def _why_plain(data: LogData, step: int) -> str:
    """Why the policy drafted nothing for one request of a step."""
    if not data.reasons[step]:
        if data.modes[step] == "probe_plain":
            return "a probe of plain decoding"
        if data.modes[step] in ("speculate", "probe_draft"):
            return "a draft for this request was not expected to pay"
    return step_reason(data, step)
