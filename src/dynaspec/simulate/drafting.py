"""Drafts from a trace, under a plan's stop rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.step import LOGIT_RANGE, DraftView, StopRule

from .traces import Floats, Ints, Trace

_EDGE = 1e-9


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was drafted."""

    lens: Ints
    """[B]"""
    confidence: Floats | None
    """[B, K]; undefined behind a draft's end."""

    def view(self) -> DraftView:
        lens = self.lens.tolist()
        if self.confidence is None:
            return DraftView(length=tuple(lens), confidence=((),) * len(lens))
        rows = self.confidence.tolist()
        return DraftView(
            length=tuple(lens), confidence=tuple([tuple(row[:n]) for row, n in zip(rows, lens, strict=True)])
        )


def draft(trace: Trace, at: Ints, left: Ints, depth: Ints, stop: StopRule | None) -> Drafted:
    """
    Args:
        at: [B] places of the requests' positions in the trace.
        left: [B] output tokens that each request still gets.
        depth: [B] tokens granted.
        stop: evaluated after each pass, as the engine's proposers do.
    """
    longest = int(depth.max(initial=0))
    if longest == 0 or trace.confidence is None or trace.stray is None:
        return Drafted(depth, None)
    slots = np.arange(longest)
    where = at[:, None] + slots
    # The first token that is not accepted still follows the true text; those behind it do not.
    true_text = (slots <= trace.runs[at][:, None]) & (slots < left[:, None])
    confidence = np.where(true_text, trace.confidence[where], trace.stray[where])
    if stop is None:
        return Drafted(depth, confidence)
    signal = _survival(confidence, stop) if stop.signal == "survival" else confidence
    below = _entries(stop.below, longest)
    if stop.scope == "batch_mean":
        return Drafted(_together(signal, below, depth), confidence)
    lens = _each(signal, below, depth)
    if stop.total_below:
        lens = _while_worth(signal - below, _entries(stop.total_below, longest), lens)
    return Drafted(lens, confidence)


def _survival(confidence: Floats, stop: StopRule) -> Floats:
    logit = np.log(confidence / np.maximum(1.0 - confidence, _EDGE) + _EDGE).clip(-LOGIT_RANGE, LOGIT_RANGE)
    offset = np.array(stop.offset or (0.0,), dtype=np.float64)[:, None]
    odds = np.exp(stop.weight * logit + _entries(stop.bias or (0.0,), confidence.shape[1]) + offset)
    return np.asarray(np.cumprod(odds / (1.0 + odds), axis=1), dtype=np.float64)


def _entries(column: Sequence[float], size: int) -> Floats:
    """The first ``size`` entries; the last one goes on."""
    return np.array(column, dtype=np.float64)[np.minimum(np.arange(size), len(column) - 1)]


def _each(signal: Floats, below: Floats, depth: Ints) -> Ints:
    low = signal < below
    first = np.where(low.any(axis=1), low.argmax(axis=1) + 1, depth)
    return np.minimum(first, depth)


def _together(signal: Floats, below: Floats, depth: Ints) -> Ints:
    for j in range(signal.shape[1]):
        running = depth > j
        if signal[running, j].mean() < below[j]:
            return np.minimum(depth, j + 1)
    return depth


def _while_worth(gain: Floats, total_below: Floats, lens: Ints) -> Ints:
    """Ends all drafts after the first pass in which those that go on gain less together than a pass must."""
    going_on = lens[:, None] > np.arange(1, gain.shape[1] + 1)
    poor = np.where(going_on, gain, 0.0).sum(axis=0) < total_below
    return np.minimum(lens, int(poor.argmax()) + 1) if poor.any() else lens
