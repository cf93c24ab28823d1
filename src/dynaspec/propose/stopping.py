"""Stopping between draft passes, evaluated where the drafter's signals are.

On CUDA the host must not wait for the device between passes, so it reads the mask one pass late: a row that has
stopped may run once more, and what it drafted then is cut off. Reference: dynamic speculation lookahead (Mamou et
al., 2405.04304).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import inlined, kernel
from dynaspec.contract.step import StopRule

Floats = npt.NDArray[np.floating]
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
    return _SurvivalOnHost(rule, depth) if rule.signal == "survival" else _OnHost(rule, depth)


def at_pass(column: tuple[float, ...], done: int) -> float:
    """The entry for pass number ``done``; the last one goes on, and an empty column is 0 throughout."""
    return column[min(done, len(column)) - 1] if column else 0.0


class _Unstopped:
    def __init__(self, depth: Int64) -> None:
        self._lengths = depth.copy()

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        """Nothing stops."""

    def running(self, done: int) -> Int64:
        return (self._lengths > done).nonzero()[0]

    def lengths(self) -> Int64:
        return self._lengths


class _OnHost(_Unstopped):
    def __init__(self, rule: StopRule, depth: Int64) -> None:
        super().__init__(depth)
        self._rule = rule

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        values: Floats = signal.numpy()
        stop(
            self._lengths,
            rows,
            values,
            done,
            float(values.dtype.type(at_pass(self._rule.below, done))),
            at_pass(self._rule.total_below, done) if self._rule.total_below else -np.inf,
            self._rule.scope == "batch_mean",
        )


class _SurvivalOnHost(_Unstopped):
    """The signal is the chance of each row's draft that all of it is accepted."""

    def __init__(self, rule: StopRule, depth: Int64) -> None:
        super().__init__(depth)
        self._rule = rule
        self._chance = np.ones(depth.size)
        self._offset = np.array(rule.offset) if rule.offset else np.zeros(depth.size)

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        rule = self._rule
        survive_or_stop(
            self._lengths,
            rows,
            self._chance,
            signal.numpy(),
            rule.weight,
            at_pass(rule.bias, done),
            self._offset,
            done,
            at_pass(rule.below, done),
            at_pass(rule.total_below, done) if rule.total_below else -np.inf,
            rule.scope == "batch_mean",
        )


@inlined
def entry(column: Float64, done: int) -> float:
    """``at_pass`` of an array that has an entry at least."""
    return float(column[min(done, column.size) - 1])


@kernel
def stop(
    lengths: Int64, rows: Int64, values: Floats, done: int, below: float, total_below: float, together: bool
) -> None:
    """Rows end after ``done`` tokens where their value is below, or all of them where their mean is (``together``).
    Else those that would go on end too, where Σ (value − below) over them is less than ``total_below``."""
    mean, left = values.dtype.type(0.0), values.dtype.type(0.0)
    for n in range(rows.size):
        mean += values[n]
    mean /= values.dtype.type(rows.size)
    for n in range(rows.size):
        if (mean if together else values[n]) < below:
            lengths[rows[n]] = done
        elif lengths[rows[n]] > done:
            left += values[n] - below
    if not together and left < total_below:
        for n in range(rows.size):
            lengths[rows[n]] = min(lengths[rows[n]], done)


@kernel
def survive_or_stop(
    lengths: Int64,
    rows: Int64,
    chance: Float64,
    signal: Floats,
    weight: float,
    bias: float,
    offset: Float64,
    done: int,
    below: float,
    total_below: float,
    together: bool,
) -> None:
    """``stop`` after chance[row] *= σ(weight · signal + bias + offset[row])."""
    values = np.empty(rows.size)
    for n in range(rows.size):
        chance[rows[n]] /= 1.0 + np.exp(-(weight * signal[n] + bias + offset[rows[n]]))
        values[n] = chance[rows[n]]
    stop(lengths, rows, values, done, below, total_below, together)


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
        below = at_pass(self._rule.below, done)
        lengths = torch.where(drafting & (signal < below), done, lengths)
        if self._rule.total_below and self._rule.scope == "request":
            going_on = lengths > done
            poor = ((signal - below) * going_on).sum() < at_pass(self._rule.total_below, done)
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
    """``_SurvivalOnHost``, without the host."""

    def __init__(self, rule: StopRule, rows: int, device: torch.device) -> None:
        self._rule = rule
        self._chance = torch.ones(rows, device=device)
        self._offset = torch.tensor(rule.offset or (0.0,) * rows, device=device)

    def update(self, done: int, rows: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
        score = self._rule.weight * signal + at_pass(self._rule.bias, done) + self._offset[rows]
        chance = self._chance[rows] * torch.sigmoid(score)
        self._chance[rows] = chance
        return chance
