"""The measurement of this host: sides alternate, the warm-up does not count, differences are found."""

from __future__ import annotations

import pytest

from dynaspec.contract.errors import ConfigError
from hosts_transformers import ASSISTED, OURS, PLAIN, Decoded, Options, Side, measure


def test_sides_take_turns_and_rates_are_of_all_prompts() -> None:
    order: list[str] = []
    asked: list[int] = []

    def side(name: str, seconds: float, last: int) -> Side:
        def decode(prompt: object) -> Decoded:
            order.append(name)
            return Decoded((1, 2, 3, last), seconds)

        return decode

    def counts() -> dict[str, int]:
        asked.append(len(order))
        return {"steps": len(order)}

    sides = {PLAIN: side(PLAIN, 4.0, 4), ASSISTED: side(ASSISTED, 2.0, 4), OURS: side(OURS, 1.0, 5)}
    result = measure(sides, [(0, 0, 0)] * 2, 3, "5", counts, lambda *_: None)
    assert result.rates == {PLAIN: (1.0,) * 3, ASSISTED: (2.0,) * 3, OURS: (4.0,) * 3}
    assert result.ratio(ASSISTED) == (2.0, 2.0)
    assert result.different == {PLAIN: 0, ASSISTED: 0, OURS: 6}
    assert order[:6] == [PLAIN, ASSISTED, OURS, ASSISTED, OURS, PLAIN]
    assert asked == [6, 24]  # behind the warm-up, and at the end
    assert result.as_document()["ratios"][PLAIN]["median"] == 4.0
    assert result.as_document()["counts"] == {"steps": 24}


def test_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match="0 rounds"):
        Options(rounds=0)
