"""Recomputes the worked example of docs/auto.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dynaspec.control.auto.lengths import Slots, Target, fill, weigh

CHANCES = np.array([0.8, 0.6, 0.4])
LEVELS = np.array([1, 2, 3])
DOC = Path(__file__).parents[4] / "docs" / "auto.md"


def slots(price: float = 1.0) -> Slots:
    survival, nothing = np.tile(np.cumprod(CHANCES), (2, 1)), np.zeros(2)
    return Slots(
        np.full(2, price), survival, np.full(2, 3), nothing, nothing, np.ones(2, np.bool_), 0.2e-3, 0.5e-3, False
    )


def target(row_s: float) -> Target:
    return Target(np.array([2.0, 8.0]), np.array([10e-3, 10e-3 + 6 * row_s]), 2.0)


def goodput(k: int, row_s: float) -> tuple[float, float, float]:
    tokens, seconds, _, _ = weigh(1.0, slots(), np.full(2, k), target(row_s))
    return 2 + tokens, 10e-3 + seconds, (2 + tokens) / (10e-3 + seconds)


def planned(row_s: float) -> int:
    """The length that lengths and price settle at."""
    price = 10e-3 / 2
    for _ in range(5):
        depth = fill(slots(price), LEVELS, False, target(row_s))
        price = 1.0 / goodput(int(depth[0]), row_s)[2]
    assert depth[0] == depth[1]
    return int(depth[0])


def row(name: str) -> list[float]:
    line = next(line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name}"))
    return [float(cell) for cell in re.findall(r"\d+\.?\d*", line)]


def test_the_table() -> None:
    columns = [goodput(k, 1e-4) for k in range(4)]
    assert row("tokens of the step") == pytest.approx([tokens for tokens, _, _ in columns], abs=1e-3)
    assert row("seconds of the step") == pytest.approx([1e3 * seconds for _, seconds, _ in columns], abs=0.05)
    assert row("goodput (tokens/s)") == pytest.approx([rate for _, _, rate in columns], abs=0.05)
    assert row("survival of the last slot") == pytest.approx(np.cumprod(CHANCES), abs=1e-3)


def test_the_lengths() -> None:
    assert planned(1e-4) == 3
    assert planned(2e-3) == 1
    assert goodput(1, 2e-3)[2] == pytest.approx(244.9, abs=0.05)
    price = 1.0 / goodput(1, 2e-3)[2]
    assert price == pytest.approx(4.083e-3, abs=1e-6)
    assert 2 * 0.48 * price == pytest.approx(3.92e-3, abs=1e-5)
