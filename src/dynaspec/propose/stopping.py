"""Stopping between draft passes, evaluated where the drafter's signals are.

On CUDA the host must not wait for the device between passes, so it reads the mask one pass late: a row that has
stopped may run once more, and what it drafted then is cut off. Reference: dynamic speculation lookahead (Mamou et
al., 2405.04304).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.step import StopRule


class StopMask:
    """Draft lengths of the rows of one propose call, as they become final."""

    def __init__(self, rule: StopRule | None, depth: npt.NDArray[np.int64], device: torch.device) -> None:
        """
        Args:
            rule: None = every row drafts its full depth.
            depth: [A] granted lengths, ≥ 1.
        """
        self._rule = rule
        self._depth = depth
        self._lengths = torch.from_numpy(depth.copy()).to(device)
        self._asynchronous = device.type == "cuda"
        self._known = depth.copy()
        self._copy: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def update(self, done: int, rows: npt.NDArray[np.int64], signal: torch.Tensor) -> None:
        """Applies the rule after pass number ``done`` (1-based).

        Args:
            rows: indices [r] of the rows that ran in this pass.
            signal: [r] float32, on the device.
        """
        if self._rule is None:
            return
        index = torch.from_numpy(rows).to(self._lengths.device)
        lengths = self._lengths[index]
        drafting = lengths >= done
        threshold = self._rule.below[min(done, len(self._rule.below)) - 1]
        if self._rule.scope == "batch_mean":
            signal = ((signal * drafting).sum() / drafting.sum()).expand_as(signal)
        self._lengths[index] = torch.where(drafting & (signal < threshold), done, lengths)
        self._publish()

    def running(self, done: int) -> npt.NDArray[np.int64]:
        """Rows [r] that go on after ``done`` passes, as far as the host knows."""
        return np.flatnonzero(self._known > done)

    def lengths(self) -> npt.NDArray[np.int64]:
        """[A] final draft lengths; waits for the device."""
        return self._lengths.cpu().numpy()

    def _publish(self) -> None:
        if not self._asynchronous:
            self._known = self._lengths.numpy()
            return
        if self._copy is not None:
            previous, event = self._copy
            event.synchronize()  # of the pass before: has run while this one was being queued
            self._known = previous.numpy()
        host = torch.empty_like(self._lengths, device="cpu", pin_memory=True)
        host.copy_(self._lengths, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copy = (host, event)
