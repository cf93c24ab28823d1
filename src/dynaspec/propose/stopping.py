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

from dynaspec.contract.step import StopRule

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
        rule: None = every row drafts its full depth.
        depth: [A] granted lengths, ≥ 1.
    """
    if rule is None:
        return _Unstopped(depth)
    return _OnDevice(rule, depth, device) if device.type == "cuda" else _OnHost(rule, depth)


def _threshold(rule: StopRule, done: int) -> float:
    return rule.below[min(done, len(rule.below)) - 1]


class _Unstopped:
    def __init__(self, depth: Int64) -> None:
        self._lengths = depth.copy()

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        """Nothing stops."""

    def running(self, done: int) -> Int64:
        return np.flatnonzero(self._lengths > done)

    def lengths(self) -> Int64:
        return self._lengths


class _OnHost(_Unstopped):
    def __init__(self, rule: StopRule, depth: Int64) -> None:
        super().__init__(depth)
        self._rule = rule

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        values, threshold = signal.numpy(), np.float32(_threshold(self._rule, done))
        if self._rule.scope == "request":
            self._lengths[rows[values < threshold]] = done
        elif np.add.reduce(values) / np.float32(rows.size) < threshold:
            self._lengths[rows] = done


class _OnDevice:
    def __init__(self, rule: StopRule, depth: Int64, device: torch.device) -> None:
        self._rule = rule
        self._lengths = torch.from_numpy(depth).to(device, copy=True)
        self._known = depth
        self._copy: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def update(self, done: int, rows: Int64, signal: torch.Tensor) -> None:
        index = torch.from_numpy(rows).to(self._lengths.device)
        lengths = self._lengths[index]
        drafting = lengths >= done
        if self._rule.scope == "batch_mean":
            signal = ((signal * drafting).sum() / drafting.sum()).expand_as(signal)
        self._lengths[index] = torch.where(drafting & (signal < _threshold(self._rule, done)), done, lengths)
        self._publish()

    def running(self, done: int) -> Int64:
        return np.flatnonzero(self._known > done)

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
