"""A pretended vLLM in plain values: requests that draft and verify in vLLM's order of events, at given costs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from dynaspec.hosts.vllm.step_tracker import Row, Step, StepTracker, Verified


@dataclass
class Request:
    """One that has been prefilled."""

    id: str
    left: int
    """Tokens that it still has to emit."""
    chance: float
    """Of each draft token to be accepted."""
    length: int = 100
    drafts: int = 0
    """Drafted tokens that its next step verifies."""


@dataclass
class Prices:
    """Seconds of a step."""

    fixed: float = 0.010
    row: float = 0.0002
    drafter_pass: float = 0.001
    """The first one too, which every step runs."""

    def step_s(self, rows: int, k: int, *, runs_model: bool) -> float:
        return self.fixed + self.row * rows + (self.drafter_pass * max(1, k) if runs_model else 0.0)


@dataclass
class Machine:
    """Steps are scheduled one ahead under ``asynchronous``, as vLLM does."""

    tracker: StepTracker
    prices: Prices = field(default_factory=Prices)
    runs_model: bool = True
    asynchronous: bool = False
    now: float = 0.0
    lengths: list[int] = field(default_factory=list)
    """k of every step."""
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def run(self, requests: list[Request], steps: int) -> int:
        """Returns the tokens emitted."""
        emitted = 0
        flying: list[tuple[Step, list[Request]]] = []
        for _ in range(steps):
            running = [r for r in requests if r.left > 0]
            if not running:
                break
            flying.append((self._schedule(running), running))
            if len(flying) > int(self.asynchronous):
                emitted += self._finish(*flying.pop(0))
        for pair in flying:
            emitted += self._finish(*pair)
        ended = [r.id for r in requests if r.left <= 0]
        self.tracker.forget(ended)
        return emitted

    def _schedule(self, running: list[Request]) -> Step:
        rows = [
            Row(
                id=r.id,
                rows=1 + r.drafts,
                drafts=r.drafts,
                computed=r.length - 1,
                decoding=True,
                goes_on=True,
                length=r.length + 1,
                room=max(0, r.left - 2),
                space=64,
            )
            for r in running
        ]
        step = self.tracker.schedule(rows, 0, self.now)
        self.lengths.append(step.k)
        depths = dict(step.depths)
        for r in running:
            r.drafts = depths.get(r.id, 0)
        return step

    def _finish(self, step: Step, running: list[Request]) -> int:
        self.now += self.prices.step_s(sum(row.rows for row in step.rows), step.k, runs_model=self.runs_model)
        verified = {}
        for row, request in zip(step.rows, running, strict=True):
            if request.left <= 0:
                continue
            accepted = 0
            while accepted < row.drafts and self.rng.random() < request.chance:
                accepted += 1
            count = min(accepted + 1, request.left)
            request.left -= count
            request.length += count
            verified[row.id] = Verified(accepted + 1, count)
        self.tracker.commit(step, verified, self.now)
        if not self.asynchronous:
            kept = self.tracker.drafted(step, {row.id: step.k for row in step.rows}, self.now)
            for request in running:
                request.drafts = min(request.drafts, kept.get(request.id, 0))
        return sum(v.emitted for v in verified.values())
