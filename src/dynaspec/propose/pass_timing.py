"""What the models' passes cost here: a few trials as a host starts, for policies that weigh costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.costs import Curve, PassCosts
from dynaspec.kv.blocks import Arena
from dynaspec.model.attention.base import KV
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.config import DecoderConfig

Floats = npt.NDArray[np.float64]

TARGET_ROWS = (1, 4, 8, 14, 16, 28, 32, 64)
DRAFTER_ROWS = (1, 4, 16)
CONTEXT_ROWS, CONTEXT = 16, 256
"""Rows, and the KV entries that each sees, of the passes that tell what context costs the target. A drafter's rows all
see so many: its passes have no price for context apart, and it is a good part of what they take."""
SHARED_BY = 4
"""Rows of a request in the pass that tells what reading its KV costs, which is done once for all of them."""
AROUND_PASS_S, AROUND_DRAFT_S, AROUND_DRAFT_PASS_S = 4e-4, 2.5e-4, 5e-5
"""What the host does beside the model's work, in the target's pass, in a draft and in each of its passes: seconds on a
server's CPU, as a first guess. The first steps tell; but what they take more than was expected is laid upon all that
they did, and drafting looks expensive until many have been seen."""
AROUND_COMPILED_PASS_S = 1e-5
"""The same in each pass of a draft that is one compiled call."""
_IN_A_DRAFT = 4
"""Passes of a drafter that are timed together, as it runs them, …"""
_FAST_S = 0.02
"""… if one takes less than this: what is around slower ones does not matter."""
TRIALS = 8
_SHORTEST_S = 1e-9
BUDGET_S = 1.0
"""Once all has taken longer, no larger passes are tried, and none again."""


class Timed(Protocol):
    """As much of ``Model`` as it takes to time passes."""

    config: DecoderConfig
    device: torch.device

    @property
    def compiled(self) -> object | None: ...

    def forward(self, batch: ForwardBatch, kv: Sequence[KV]) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None: ...


class Passes(Protocol):
    """Runs passes to be timed."""

    @property
    def compiled(self) -> bool:
        """Whether those of a draft are one compiled call."""
        ...

    @property
    def tokens_a_row(self) -> int:
        """Tokens that a pass gives for each row."""
        ...

    def run(self, rows: int, context: int = 0, rows_each: int = 1, passes: int = 1) -> None:
        """See ``Runner``."""
        ...


@dataclass(frozen=True, slots=True)
class Runner:
    """A model and its KV."""

    model: Timed
    arena: Arena

    @property
    def compiled(self) -> bool:
        """See ``Passes``."""
        return self.model.compiled is not None

    @property
    def tokens_a_row(self) -> int:
        """See ``Passes``."""
        return 1

    def run(self, rows: int, context: int = 0, rows_each: int = 1, passes: int = 1) -> None:
        """Passes over rows that write no KV, with the logits of all of them; waits for the device.

        Args:
            rows: a multiple of ``rows_each``.
            context: KV entries that each row sees, whatever is in them; as many as arena and positions have at most.
            rows_each: rows of a request, which are at the same position.
            passes: as those of a draft, one right after the other.
        """
        blocks, requests = self.arena.layers[0][0].shape[0], rows // rows_each
        context = min(context, (blocks - 1) * BLOCK_SIZE, self.model.config.max_position - 1)
        width = (context + rows_each - 1) // BLOCK_SIZE + 1
        batch = ForwardBatch(
            tokens=torch.zeros(rows, dtype=torch.int64, device=self.model.device),
            positions=np.full(rows, context, dtype=np.int64),
            slots=np.full(rows, -1, dtype=np.int64),
            query_start=np.arange(0, rows + 1, rows_each, dtype=np.int32),
            context_lens=np.full(requests, context, dtype=np.int32),
            block_tables=(np.arange(requests * width, dtype=np.int32) % blocks).reshape(requests, width),
        )
        if passes > 1:
            self.model.repeat(batch, self.arena.layers, passes - 1)
        self.model.logits(self.model.forward(batch, self.arena.layers))[0, 0].item()


@dataclass(slots=True)
class _Pass:
    """Trials of a pass over ``rows`` that each see ``context`` KV entries, ``rows_each`` the same ones."""

    runner: Passes
    rows: int
    context: int = 0
    rows_each: int = 1
    after: Passes | None = None
    """A pass of this model comes before each trial, which then is of several passes."""
    firsts: list[float] = field(default_factory=list)
    """Seconds of the first of them."""
    trials: list[float] = field(default_factory=list)
    """Seconds, one a round."""
    seconds: float = 0.0
    """As it usually is."""
    more_at_first: float = 0.0
    """Seconds that the first takes more than the others."""

    def load(self) -> None:
        """Compiles what it needs, and warms caches up."""
        self.runner.run(self.rows, self.context, self.rows_each, 1 if self.after is None else 2)

    def measure(self, clock: Callable[[], float]) -> None:
        if self.after is None:
            self.trials.append(self._seconds(clock))
            return
        self.after.run(1)
        self.firsts.append(self._seconds(clock))
        passes = _IN_A_DRAFT if self.firsts[0] < _FAST_S else 1
        self.trials.append(self._seconds(clock, passes) / passes)

    def settle(self, slowness: Floats) -> None:
        """The trials are over.

        Args:
            slowness: [rounds] of the machine, see ``_slowness``.
        """
        self.seconds = float(np.median(self.trials / slowness))
        if self.firsts:
            self.more_at_first = max(0.0, float(np.median(self.firsts / slowness)) - self.seconds)

    def _seconds(self, clock: Callable[[], float], passes: int = 1) -> float:
        started = clock()
        self.runner.run(self.rows, self.context, self.rows_each, passes)
        return clock() - started


def measure_costs(
    target: Passes | None, drafters: Sequence[Passes | None], clock: Callable[[], float], max_rows: int
) -> PassCosts:
    """Times passes of each model.

    Sizes and models take turns, and each trial is held against how slow the machine was in its round: where it is slow
    for a second, all of them are, and no size alone, which would look expensive for long.

    Args:
        target: None = somebody else runs it, and its passes are not timed.
        drafters: one entry a proposer; None for one that runs no model.
        clock: seconds.
        max_rows: most rows of a target pass.
    """
    deadline = clock() + BUDGET_S
    drafting = [
        []
        if one is None
        else _loaded([_Pass(one, rows, CONTEXT, after=target) for rows in DRAFTER_ROWS], clock, deadline)
        for one in drafters
    ]
    sizes = [] if target is None else [_Pass(target, rows) for rows in TARGET_ROWS if rows <= max_rows]
    verifying = _loaded(sizes, clock, deadline)
    # Only where there is something to compare it with, and time left.
    blind = next((one for one in verifying if one.rows == CONTEXT_ROWS and clock() <= deadline), None)
    each = (1, SHARED_BY) if blind is not None else ()
    shared = [] if target is None else [_Pass(target, CONTEXT_ROWS, CONTEXT, rows_each) for rows_each in each]
    seeing = _loaded(shared, clock, deadline)
    everything = [*(one for passes in drafting for one in passes), *verifying, *seeing]
    for _ in range(TRIALS):
        for one in everything:
            one.measure(clock)
        if clock() > deadline:
            break
    slowness = _slowness(everything)
    for one in everything:
        one.settle(slowness)
    context_s, read_s = _context_s(blind, seeing)
    return PassCosts(
        target=_curve(verifying, AROUND_PASS_S),
        drafters=tuple(
            _curve(passes, _around_draft_pass_s(one)) for passes, one in zip(drafting, drafters, strict=True)
        ),
        first_s=tuple(_first_s(passes) for passes in drafting),
        context_s=context_s,
        read_s=read_s,
    )


def _loaded(passes: Sequence[_Pass], clock: Callable[[], float], deadline: float) -> list[_Pass]:
    """The passes that there is time for, smallest first, at least one, which have been run once."""
    loaded: list[_Pass] = []
    for one in passes:
        if loaded and clock() > deadline:
            break
        one.load()
        loaded.append(one)
    return loaded


def _slowness(passes: Sequence[_Pass]) -> Floats:
    """[rounds] How many times as long as usual most passes took; a pass that was disturbed alone changes nothing."""
    if not passes:
        return np.ones(0)
    trials = np.maximum([one.trials for one in passes], _SHORTEST_S)
    slowness: Floats = np.median(trials / np.median(trials, axis=1, keepdims=True), axis=0)
    return slowness


def _context_s(blind: _Pass | None, seeing: Sequence[_Pass]) -> tuple[float, float]:
    """Seconds for each KV entry that a row sees, and for each that is read for a request; 0 = not measured.

    Args:
        blind: sees none.
        seeing: as many rows that do, each of a request of its own; and as many of fewer requests.
    """
    if blind is None or not seeing:
        return 0.0, 0.0
    more_s = [max(0.0, one.seconds - blind.seconds) / (CONTEXT_ROWS * CONTEXT) for one in seeing]
    if len(more_s) == 1:  # no time for the other: a row's and its request's are not told apart
        return 0.0, more_s[0]
    alone, shared = more_s
    read_s = max(0.0, alone - shared) / (1.0 - 1.0 / SHARED_BY)
    return max(0.0, alone - read_s), min(alone, read_s)


def _curve(passes: Sequence[_Pass], around_s: float) -> Curve:
    """(rows, seconds); tokens for rows where a row gives several."""
    return tuple((one.rows * one.runner.tokens_a_row, around_s + one.seconds) for one in passes)


def _around_draft_pass_s(drafter: Passes | None) -> float:
    return AROUND_COMPILED_PASS_S if drafter is not None and drafter.compiled else AROUND_DRAFT_PASS_S


def _first_s(passes: Sequence[_Pass]) -> float:
    """Seconds that a draft takes more than its passes; 0 without a model."""
    return AROUND_DRAFT_S + sum(one.more_at_first for one in passes) / len(passes) if passes else 0.0
