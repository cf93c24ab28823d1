"""Policies side by side, and the arithmetic of rounds."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dynaspec.bench.offline import (
    Workload,
    as_json,
    as_table,
    best_on_odd_rounds,
    compare,
    even_rounds,
    lower_bound,
    odd_rounds,
    ratios,
)
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from unit.bench.fakes import FakeDecoder

PARAMS = SamplingParams(temperature=0, max_tokens=6)


def workload(rounds: int = 2) -> Workload:
    return Workload(((1, 2), (7,), (4,)), ("code", "maths", "code"), PARAMS, rounds)


def test_rounds_alternate():
    said = []
    decoders = {"plain": FakeDecoder(), "constant:4": FakeDecoder(2)}
    compare(decoders, workload(3), said.append)
    assert said == [
        *("plain: warm-up", "constant:4: warm-up"),
        *("plain: round 1 of 3", "constant:4: round 1 of 3"),
        *("constant:4: round 2 of 3", "plain: round 2 of 3"),
        *("plain: round 3 of 3", "constant:4: round 3 of 3"),
    ]
    assert [decoder.calls for decoder in decoders.values()] == [4, 4]


@pytest.mark.parametrize("wrong", [1, 2])
def test_one_differing_output_in_any_round_is_seen(wrong):
    decoders = {"plain": FakeDecoder(), "good": FakeDecoder(2), "bad": FakeDecoder(2, wrong=wrong)}
    plain, good, bad = compare(decoders, workload(), lambda message: None)
    assert plain.identical
    assert good.identical
    assert not bad.identical
    assert bad.different == 1
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(as_table([plain, good, bad], "title"))
    text = console.export_text()
    assert "NO (1)" in text
    assert text.count("yes") == 2


def test_plain_decoding_must_agree_with_itself():
    plain = compare({"plain": FakeDecoder(wrong=2)}, workload(), lambda message: None)[0]
    assert not plain.identical


def test_json():
    (_, result) = compare({"plain": FakeDecoder(), "k": FakeDecoder(2)}, workload(), lambda message: None)
    document = json.loads(json.dumps(as_json(result, workload())))
    assert document["policy"] == "k"
    assert document["output_tokens"] == 18
    assert document["identical"] is True
    assert document["different_outputs"] == 0
    assert len(document["tokens_per_second_rounds"]) == len(document["seconds_rounds"]) == 2
    assert document["counts"]["mean_acceptance_length"] == 2.0  # of one round
    assert document["counts"]["draft_tokens"] == 4
    assert document["by_category"]["code"] == {
        "continuations": 2,
        "output_tokens": 12,
        "steps": 8,
        "drafted": 8,
        "accepted": 4,
        "tokens_per_step": 1.5,
    }


def test_plain_is_needed():
    with pytest.raises(ConfigError, match="expected plain"):
        compare({"constant:4": FakeDecoder()}, workload(), lambda message: None)


finite = st.floats(0.1, 10, allow_nan=False)


def test_rounds_are_split_by_their_number():
    assert odd_rounds([1, 2, 3, 4, 5]) == [1, 3, 5]
    assert even_rounds([1, 2, 3, 4, 5]) == [2, 4]


def test_the_best_is_picked_on_odd_rounds_alone():
    rates = {"a": [10, 1, 10, 1, 10], "b": [9, 99, 9, 99, 9]}
    assert best_on_odd_rounds(rates) == "a"


def test_ratios_are_of_the_same_round():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])


def test_a_bound_of_values_that_do_not_vary_is_the_value():
    assert lower_bound([1.5] * 7) == 1.5


def test_a_bound_of_nothing():
    with pytest.raises(ConfigError, match="no values"):
        lower_bound([])


@given(st.lists(finite, min_size=1, max_size=15))
def test_a_bound_is_one_of_the_values_and_below_the_median(values):
    bound = lower_bound(values)
    assert min(values) <= bound <= np.median(values)


def test_three_rounds_are_bounded_by_the_worst():
    # The median of three draws is the smallest in 7 of 27 cases: more than one in twenty.
    assert lower_bound([0.9, 1.0, 1.1]) == 0.9


def test_an_outlier_among_many_does_not_drag_the_bound():
    assert lower_bound([0.2, *[1.0] * 14]) == 1.0


def test_coverage():
    """The bound lies below the true median in about 95 % of samples."""
    random = np.random.default_rng(0)
    below = sum(lower_bound(random.normal(1.0, 0.1, 15).tolist(), seed=i) <= 1.0 for i in range(200))
    assert 180 <= below <= 200


def test_those_that_sat_out_are_no_rivals():
    assert best_on_odd_rounds({"a": [1, 2, 3], "b": [9, 9], "c": [1, 1, 1]}) == "a"
