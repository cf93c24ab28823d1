"""Stopping between draft passes, evaluated where the drafter's signals are.

On CUDA the host must not wait for the device between passes, so it reads the mask one pass late: a row that has
stopped may run once more, and what it drafted then is cut off. Reference: dynamic speculation lookahead (Mamou et
al., 2405.04304).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import inlined, kernel
from dynaspec.contract.step import StopRule

Floats = npt.NDArray[np.floating]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class StopMask(Protocol):
    """Draft lengths of the rows of one propose call, as they become final."""

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        """Applies the rule after pass number ``done`` (1-based).

        Args:
            rows: indices [r] of the rows that ran in this pass.
            signal: [r] float32, on the device.
        """
        ...

    def running(self, done: int) -> Int64:
        """Rows [r] that go on after ``done`` passes, as far as the host knows."""
        ...

    def lengths(self) -> Int64:
        """[A] final draft lengths; waits for the device."""
        ...


def stop_mask(rule: StopRule | None, depth: Int64, device: torch.device) -> StopMask:
    """The mask of a propose call.

    Args:
        rule: None = every row drafts its full depth. Its ``offset``, if there is one, has an entry a row.
        depth: [A] granted lengths, ≥ 1.
    """
    if rule is None:
        return _Unstopped(depth)
    if device.type == "cuda":
        return _OnDevice(rule, depth, device)
    return _OnHost(rule, depth)


class _Unstopped:
    def __init__(self, depth: Int64) -> None:
        self._lengths = depth.copy()

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        """Nothing stops."""

    def running(self, done: int) -> Int64:
        return (self._lengths > done).nonzero()[0]

    def lengths(self) -> Int64:
        return self._lengths


@inlined
def entry(column: Float64, done: int) -> float:
    """The entry for pass number ``done``; the last one goes on."""
    return float(column[min(done, column.size) - 1])


class CompiledRule(NamedTuple):
    """A stop rule for compiled code, and the drafts that it ends. A rows."""

    lengths: Int64
    """[A] tokens of each draft; those granted, as long as it has not ended."""
    survives: bool
    """The rule looks at ``chance`` [A], that all of a draft is accepted, which follows from ``weight``, ``bias`` and
    ``offset`` [A]; else at the signal itself."""
    weight: float
    bias: Float64
    chance: Float64
    offset: Float64
    below: Float64
    total_below: Float64
    """One entry a pass, the last one goes on. −∞ = never."""
    together: bool


def compiled_rule(rule: StopRule, lengths: Int64) -> CompiledRule:
    """The rule for drafts of these lengths [A], which it shortens."""
    survives = rule.signal == "survival"
    # Confidences are compared in their own precision.
    below = np.array(rule.below or (0.0,), np.float64 if survives else np.float32).astype(np.float64)
    return CompiledRule(
        lengths=lengths,
        survives=survives,
        weight=rule.weight,
        bias=np.array(rule.bias or (0.0,)),
        chance=np.ones(lengths.size),
        offset=np.array(rule.offset) if rule.offset else np.zeros(lengths.size),
        below=below,
        total_below=np.array(rule.total_below or (-np.inf,)),
        together=rule.scope == "batch_mean",
    )


@kernel
def apply_rule(rule: CompiledRule, rows: Int64, signal: Float32, done: int) -> None:
    """Ends drafts of the rows [r] that have run, after ``done`` tokens, by their signal [r]."""
    if not rule.survives:
        _stop(rule, rows, signal, done)
        return
    values, bias = np.empty(rows.size), entry(rule.bias, done)
    for n in range(rows.size):
        rule.chance[rows[n]] /= 1.0 + np.exp(-(rule.weight * signal[n] + bias + rule.offset[rows[n]]))
        values[n] = rule.chance[rows[n]]
    _stop(rule, rows, values, done)


@kernel
def _stop(rule: CompiledRule, rows: Int64, values: Floats, done: int) -> None:
    """Rows end after ``done`` tokens where their value is below, or all of them where their mean is (``together``).
    Else those that would go on end too, where Σ (value − below) over them is less than ``total_below``."""
    lengths, below = rule.lengths, entry(rule.below, done)
    mean, left = values.dtype.type(0.0), values.dtype.type(0.0)
    for n in range(rows.size):
        mean += values[n]
    mean /= values.dtype.type(rows.size)
    for n in range(rows.size):
        if (mean if rule.together else values[n]) < below:
            lengths[rows[n]] = done
        elif lengths[rows[n]] > done:
            left += values[n] - below
    if not rule.together and left < entry(rule.total_below, done):
        for n in range(rows.size):
            lengths[rows[n]] = min(lengths[rows[n]], done)


class _OnHost(_Unstopped):
    def __init__(self, rule: StopRule, depth: Int64) -> None:
        super().__init__(depth)
        self._rule = compiled_rule(rule, self._lengths)

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        apply_rule(self._rule, rows, signal.numpy(), done)


def _at_pass(column: tuple[float, ...], done: int) -> float:
    """The entry for pass number ``done``; the last one goes on, and an empty column is 0 throughout."""
    return column[min(done, len(column)) - 1] if column else 0.0


class _OnDevice:
    def __init__(self, rule: StopRule, depth: Int64, device: torch.device) -> None:
        self._rule = rule
        self._lengths = torch.from_numpy(depth).to(device, copy=True)
        self._known = depth
        self._copy: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._survival = _SurvivalOnDevice(rule, depth.size, device) if rule.signal == "survival" else None

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        index = torch.from_numpy(rows).to(self._lengths.device)
        lengths = self._lengths[index]
        drafting = lengths >= done
        if self._survival is not None:
            signal = self._survival.update(done, index, signal)
        if self._rule.scope == "batch_mean":
            signal = ((signal * drafting).sum() / drafting.sum()).expand_as(signal)
        below = _at_pass(self._rule.below, done)
        lengths = torch.where(drafting & (signal < below), done, lengths)
        if self._rule.total_below and self._rule.scope == "request":
            going_on = lengths > done
            poor = ((signal - below) * going_on).sum() < _at_pass(self._rule.total_below, done)
            lengths = torch.where(going_on & poor, done, lengths)
        self._lengths[index] = lengths
        self._publish()

    def running(self, done: int) -> Int64:
        return (self._known > done).nonzero()[0]

    def lengths(self) -> Int64:
        return self._lengths.cpu().numpy()

    def _publish(self) -> None:
        if self._copy is not None:
            previous, event = self._copy
            event.synchronize()  # of the pass before: has run while this one was being queued
            self._known = previous.numpy()
        host = torch.empty_like(self._lengths, device="cpu", pin_memory=True)
        host.copy_(self._lengths, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copy = (host, event)


class _SurvivalOnDevice:
    """The chance of each row's draft that all of it is accepted, without the host."""

    def __init__(self, rule: StopRule, rows: int, device: torch.device) -> None:
        self._rule = rule
        self._chance = torch.ones(rows, device=device)
        self._offset = torch.tensor(rule.offset or (0.0,) * rows, device=device)

    def update(self, done: int, rows: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
        score = self._rule.weight * signal + _at_pass(self._rule.bias, done) + self._offset[rows]
        chance = self._chance[rows] * torch.sigmoid(score)
        self._chance[rows] = chance
        return chance
