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

from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.sampling.compiled import kernel

Floats = npt.NDArray[np.floating]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_LOWEST = 1.0 / (1.0 + float(np.exp(LOGIT_RANGE)))


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
    return _OnDevice(rule, depth, device) if device.type == "cuda" else _OnHost(rule, depth)


def _at(column: tuple[float, ...], done: int) -> float:
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
        self._survival = _Survival(rule, depth.size) if rule.signal == "survival" else None

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        values: Floats = signal.numpy()
        if self._survival is not None:
            values = self._survival.update(done, rows, values)
        threshold = values.dtype.type(_at(self._rule.below, done))
        if self._rule.scope == "request":
            self._lengths[rows[values < threshold]] = done
            if self._rule.total_below:
                going_on = self._lengths[rows] > done
                if np.add.reduce((values - threshold)[going_on]) < _at(self._rule.total_below, done):
                    self._lengths[rows[going_on]] = done
        elif np.add.reduce(values) / values.dtype.type(rows.size) < threshold:
            self._lengths[rows] = done


class _Survival:
    """The chance of each row's draft that all of it is accepted."""

    def __init__(self, rule: StopRule, rows: int) -> None:
        self._rule = rule
        self._chance = np.ones(rows)
        self._offset = np.array(rule.offset) if rule.offset else np.zeros(rows)

    def update(self, done: int, rows: Int64, confidence: Floats) -> Float64:
        """[r] after another token of each of ``rows``."""
        _survive(self._chance, rows, confidence, self._rule.weight, _at(self._rule.bias, done), self._offset)
        survived: Float64 = self._chance[rows]
        return survived


@kernel
def _survive(chance: Float64, rows: Int64, confidence: Floats, weight: float, bias: float, offset: Float64) -> None:
    """chance[row] *= σ(weight · logit(confidence) + bias + offset[row])."""
    for n in range(rows.size):
        c = min(max(np.float64(confidence[n]), _LOWEST), 1.0 - _LOWEST)
        chance[rows[n]] /= 1.0 + np.exp(-(weight * np.log(c / (1.0 - c)) + bias + offset[rows[n]]))


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
        below = _at(self._rule.below, done)
        lengths = torch.where(drafting & (signal < below), done, lengths)
        if self._rule.total_below:
            going_on = lengths > done
            poor = ((signal - below) * going_on).sum() < _at(self._rule.total_below, done)
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
    """``_Survival``, without the host."""

    def __init__(self, rule: StopRule, rows: int, device: torch.device) -> None:
        self._rule = rule
        self._chance = torch.ones(rows, device=device)
        self._offset = torch.tensor(rule.offset or (0.0,) * rows, device=device)

    def update(self, done: int, rows: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        logit = torch.logit(confidence, eps=_LOWEST)
        accepted = torch.sigmoid(self._rule.weight * logit + _at(self._rule.bias, done) + self._offset[rows])
        chance = self._chance[rows] * accepted
        self._chance[rows] = chance
        return chance
