"""A constant draft length (Leviathan et al., 2211.17192)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaspec.contract.step import StepOutcome, StepView


class Constant:
    """``k`` tokens in every step."""

    def __init__(self, k: int) -> None:
        self._k = k

    def length(self, view: StepView) -> int:
        return self._k

    def observe(self, outcome: StepOutcome) -> None:
        """Nothing to learn."""

    def estimates(self) -> Mapping[str, Any]:
        return {}
