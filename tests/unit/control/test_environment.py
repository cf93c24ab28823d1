from __future__ import annotations

import logging
from typing import Any

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.control import SpeculativeConfig
from dynaspec.control.environment import ADAPTIVE_DRAFT_LENGTH, CONFIDENCE_THRESHOLD
from dynaspec.control.resolve import DEFAULT_POLICY


def decided(environ: dict[str, str], **keys: Any) -> tuple[str, object]:
    config = SpeculativeConfig.parse({"model": "drafter"} | keys, environ)
    assert config is not None
    return config.policy, config.draft_confidence_threshold


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (DEFAULT_POLICY, None)),
        ({CONFIDENCE_THRESHOLD: "0.6"}, ("confidence", 0.6)),
        ({CONFIDENCE_THRESHOLD: "auto"}, ("confidence", "auto")),
        ({ADAPTIVE_DRAFT_LENGTH: "1"}, ("confidence", "auto")),
        ({ADAPTIVE_DRAFT_LENGTH: "true", CONFIDENCE_THRESHOLD: "0.6"}, ("confidence", 0.6)),
        ({ADAPTIVE_DRAFT_LENGTH: "0", CONFIDENCE_THRESHOLD: "0.6"}, (DEFAULT_POLICY, None)),
        ({ADAPTIVE_DRAFT_LENGTH: "1", CONFIDENCE_THRESHOLD: "0"}, (DEFAULT_POLICY, 0.0)),
        ({ADAPTIVE_DRAFT_LENGTH: "", CONFIDENCE_THRESHOLD: " "}, (DEFAULT_POLICY, None)),
    ],
)
def test_it_fills_in_what_is_open(environ: dict[str, str], expected: tuple[str, object]) -> None:
    assert decided(environ) == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"policy": "heuristic"},
        {"policy": "constant"},
        {"num_assistant_tokens_schedule": "constant"},
        {"draft-confidence-threshold": 0.3},
        {"assistant_confidence_threshold": 0.3},
        {"draft_confidence_threshold": 0.0},
    ],
    ids=str,
)
def test_explicit_configuration_wins(keys: dict[str, Any]) -> None:
    environ = {ADAPTIVE_DRAFT_LENGTH: "1", CONFIDENCE_THRESHOLD: "0.9"}
    assert decided(environ, **keys) == decided({}, **keys)


def test_it_gives_the_confidence_policy_its_threshold() -> None:
    assert decided({CONFIDENCE_THRESHOLD: "0.9"}, policy="confidence") == ("confidence", 0.9)


def test_it_says_that_it_does_not_apply_to_ngram(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = SpeculativeConfig.parse({"method": "ngram"}, {ADAPTIVE_DRAFT_LENGTH: "1"})
    assert config == SpeculativeConfig(method="ngram")
    assert "do not apply to method 'ngram'" in caplog.text


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({CONFIDENCE_THRESHOLD: "high"}, f"{CONFIDENCE_THRESHOLD} is 'high'; expected a number from 0 to 1"),
        ({CONFIDENCE_THRESHOLD: "1.5"}, f"{CONFIDENCE_THRESHOLD} is '1.5'"),
        ({CONFIDENCE_THRESHOLD: "nan"}, f"{CONFIDENCE_THRESHOLD} is 'nan'"),
        ({ADAPTIVE_DRAFT_LENGTH: "maybe"}, f"{ADAPTIVE_DRAFT_LENGTH} is 'maybe'; expected 1 or 0"),
    ],
)
def test_a_variable_that_makes_no_sense_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decided(environ)
