from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError
from dynaspec.control import SpeculativeConfig
from dynaspec.control.synthetic import synthetic_rates
from unit.control.seam import UNHURRIED


def config(**keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig(model="m", rejection_sample_method="synthetic", **keys)


def test_tested_drafts_have_no_rates() -> None:
    assert SpeculativeConfig(model="m").synthetic_rates is None


def test_rates_are_kept_and_are_as_many_as_the_draft_is_long() -> None:
    made = config(synthetic_acceptance_rates=[0.8, 0.5, 0.5])
    assert made.synthetic_rates == (0.8, 0.5, 0.5)
    assert made.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("length", "k", "rates"),
    [
        (2.6, 3, (1.0, 0.6, 0.0)),
        (1.0, 3, (0.0, 0.0, 0.0)),
        (4.0, 3, (1.0, 1.0, 1.0)),
        (2.0, 3, (1.0, 0.0, 0.0)),
        (3.5, 4, (1.0, 1.0, 0.5, 0.0)),
    ],
)
def test_a_mean_length_is_spread_as_in_vllm(length: float, k: int, rates: tuple[float, ...]) -> None:
    made = config(synthetic_acceptance_length=length, num_speculative_tokens=k)
    assert made.synthetic_rates == pytest.approx(rates)


@UNHURRIED
@given(st.integers(1, 64), st.floats(0, 1))
def test_the_mean_is_met_and_rates_never_increase(k: int, share: float) -> None:
    length = 1 + share * k
    rates = synthetic_rates(None, length, k)
    assert 1 + sum(rates) == pytest.approx(length)
    assert list(rates) == sorted(rates, reverse=True)
    assert len(rates) == k


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 1.5}, "with both of synthetic"),
        ({"synthetic_acceptance_rates": [0.5, 0.6]}, r"is \[0.5, 0.6\]; expected rates that do not increase"),
        ({"synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 2}, "has 1 entries but .* is 2"),
        ({"synthetic_acceptance_length": 4.5, "num_speculative_tokens": 3}, "4.5 with .* 3; expected .* from 1 to 4"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**keys)
