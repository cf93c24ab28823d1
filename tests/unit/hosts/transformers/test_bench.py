"""The measurement of this host: sides alternate, the warm-up does not count, differences are found."""

from __future__ import annotations

import itertools

import pytest
import torch

from dynaspec.bench.hosts.transformers import ASSISTED, OURS, PLAIN, Options, measure
from dynaspec.contract.errors import ConfigError
from dynaspec.observe.stats import SpecStats


def test_sides_take_turns_and_rates_are_of_all_prompts() -> None:
    now, order = itertools.count(), []

    def side(name: str, seconds: int, last: int) -> object:
        def decode(text: torch.Tensor) -> torch.Tensor:
            order.append(name)
            for _ in range(seconds - 1):
                next(now)
            return torch.cat([text, torch.tensor([[1, 2, 3, last]])], dim=-1)

        return decode

    sides = {PLAIN: side(PLAIN, 4, 4), ASSISTED: side(ASSISTED, 2, 4), OURS: side(OURS, 1, 5)}
    texts = [torch.zeros(1, 3, dtype=torch.int64)] * 2
    result = measure(sides, texts, 3, SpecStats(), lambda *_: None, clock=lambda: float(next(now)))
    assert result.rates == {PLAIN: (1.0,) * 3, ASSISTED: (2.0,) * 3, OURS: (4.0,) * 3}
    assert result.ratio(ASSISTED) == (2.0, 2.0)
    assert result.different == {PLAIN: 0, ASSISTED: 0, OURS: 6}
    assert order[:6] == [PLAIN, ASSISTED, OURS, ASSISTED, OURS, PLAIN]
    assert result.as_document()["ratios"][PLAIN]["median"] == 4.0


def test_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match="0 rounds"):
        Options(rounds=0)
