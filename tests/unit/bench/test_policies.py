from __future__ import annotations

import pytest

from dynaspec.bench.policies import parse_policies, parse_policy
from dynaspec.contract.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant:4", ("draft_model", "constant", 4, None)),
        ("draft_model:constant:4", ("draft_model", "constant", 4, None)),
        ("ngram:constant:5", ("ngram", "constant", 5, None)),
        ("heuristic", ("draft_model", "heuristic", 5, None)),
        ("heuristic_transient:3", ("draft_model", "heuristic_transient", 3, None)),
        ("ngram:heuristic:2", ("ngram", "heuristic", 2, None)),
        ("confidence", ("draft_model", "confidence", 20, "auto")),
        ("confidence:0.4", ("draft_model", "confidence", 20, 0.4)),
        ("confidence:auto:8", ("draft_model", "confidence", 8, "auto")),
    ],
)
def test_forms(name, expected):
    spec = parse_policy(name, "draft")
    config = spec.config
    assert spec.name == name
    found = (config.method, config.policy, config.num_speculative_tokens, config.draft_confidence_threshold)
    assert found == expected
    assert config.model == (None if config.method == "ngram" else "draft")


def test_plain_comes_first_given_or_not():
    assert [s.name for s in parse_policies("constant:4, ngram:constant:4", "d")] == [
        "plain",
        "constant:4",
        "ngram:constant:4",
    ]
    specs = parse_policies("confidence:0.4,plain", "d")
    assert [s.name for s in specs] == ["plain", "confidence:0.4"]
    assert specs[0].config is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected plain"),
        ("magic", "'magic' is not known; expected plain, constant:K"),
        ("ngram", "'ngram' is not known"),
        ("constant", "expected constant:K"),
        ("constant:four", "value 'four'; expected an integer"),
        ("constant:0", "'constant:0': num_speculative_tokens is 0"),
        ("confidence:high", "expected a number or auto"),
        ("confidence:1.5", "'confidence:1.5': draft_confidence_threshold is 1.5"),
        ("confidence:0.4:5:6", "at most T:K"),
        ("heuristic:1:2", "at most K"),
        ("ngram:confidence:0.4", "ngram"),
        ("constant:4,constant:4", "given twice"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_policies(text, "draft")


def test_a_draft_model_is_needed():
    with pytest.raises(ConfigError, match="needs a draft model; expected --draft-model, or ngram:constant:4"):
        parse_policy("constant:4", None)
    assert parse_policy("ngram:constant:4", None).config.method == "ngram"
