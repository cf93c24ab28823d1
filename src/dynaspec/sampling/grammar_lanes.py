"""The grammars of the running requests, by lane; requests without one are passed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .dead_end import DeadEnd
from .grammar import Bits
from .grammar_state import GrammarState
from .rng import Int64
from .rows import Rows


class LaneGrammars:
    """What the grammars say of rows and drafts."""

    def __init__(self) -> None:
        self._states: dict[int, GrammarState] = {}

    def add(self, lane: int, state: GrammarState) -> None:
        """A request with a grammar takes a lane."""
        self._states[lane] = state

    def remove(self, lane: int) -> None:
        """The lane's request is gone."""
        self._states.pop(lane, None)

    def commit(self, lane: int, tokens: Sequence[int]) -> None:
        """These tokens became output."""
        if lane in self._states:
            self._states[lane].commit(tokens)

    def bits(self, rows: Rows, index: Int64) -> Bits:
        """[r, W] masks of the rows ``index`` [r], which all have a grammar: see ``Allowed``."""
        lanes = rows.lanes[index].tolist()
        allowed = [self._states[lane].allowed(rows.drafted(row)) for row, lane in zip(index, lanes, strict=True)]
        return np.stack([one.bits for one in allowed])

    def testable(self, lanes: Int64, drafts: Int64, lens: Int64) -> Int64:
        """[B] the lengths ``lens`` of drafts [B, K], without what lies behind a first token that is refused.

        Whether a token is tested still depends on those before it alone, so that acceptance stays exact.
        """
        if not self._states:
            return lens
        lens = lens.copy()
        for i, lane in enumerate(lanes.tolist()):
            if lane in self._states and lens[i] > 1:
                lens[i] = self._states[lane].testable(drafts[i, : lens[i]].tolist())
        return lens

    def refused(self, rows: Rows, index: Int64, tokens: Int64) -> npt.NDArray[np.bool_]:
        """[r] whether a grammar refuses ``tokens`` [r] in the rows ``index`` [r]."""
        refused = np.zeros(index.size, np.bool_)
        if self._states:
            for i, (row, lane) in enumerate(zip(index, rows.lanes[index].tolist(), strict=True)):
                if lane in self._states:
                    refused[i] = self._states[lane].refuses(rows.drafted(row), int(tokens[i]))
        return refused

    def dead_end(self, lane: int, drafted: Sequence[int]) -> DeadEnd:
        """What it means that no token may follow a request's output and the ``drafted`` tokens."""
        if lane not in self._states:
            return DeadEnd("error", "allowed_token_ids and bad_words leave no token; expected at least one everywhere")
        allowed = self._states[lane].allowed(drafted)
        if allowed.complete:
            return DeadEnd("stop", None)
        if allowed.fault:
            return DeadEnd("error", f"structured_outputs could not be followed any further: {allowed.fault}")
        return DeadEnd(
            "error", "structured_outputs and the request's other rules leave no token; expected at least one"
        )
