from __future__ import annotations

import logging
from typing import Any

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.resolve import (
    ADAPTIVE_DRAFT_LENGTH,
    CONFIDENCE_THRESHOLD,
    DEFAULT_POLICY,
    ELASTIC_DRAFT_LENGTH,
    KV_GATING_THRESHOLD,
)
from unit.control.seam import H100_PROFILE


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
        {"policy": "auto"},
        {"draft_confidence_threshold": 0.0, "policy": "auto"},
        {"dynamic_config_path": H100_PROFILE},
        {"draft_length_options": [2, 4]},
        {"num_speculative_tokens_per_batch_size": [[1, 8, 4]]},
    ],
    ids=str,
)
def test_explicit_configuration_wins(keys: dict[str, Any]) -> None:
    environ = {ADAPTIVE_DRAFT_LENGTH: "1", CONFIDENCE_THRESHOLD: "0.9", ELASTIC_DRAFT_LENGTH: "1"}
    assert decided(environ, **keys) == decided({}, **keys)


def test_it_gives_the_confidence_policy_its_threshold() -> None:
    assert decided({CONFIDENCE_THRESHOLD: "0.9"}, policy="confidence") == ("confidence", 0.9)


def test_it_says_that_it_does_not_apply_to_ngram(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = SpeculativeConfig.parse({"method": "ngram"}, {ADAPTIVE_DRAFT_LENGTH: "1"})
    assert config == SpeculativeConfig(method="ngram")
    assert "no effect on method 'ngram'" in caplog.text


class TestElastic:
    def made(self, environ: dict[str, str], **keys: Any) -> SpeculativeConfig:
        config = SpeculativeConfig.parse({"model": "drafter"} | keys, environ)
        assert config is not None
        return config

    def test_the_two_switches_are_independent(self) -> None:
        both = self.made({ELASTIC_DRAFT_LENGTH: "1", KV_GATING_THRESHOLD: "0.5"})
        assert (both.policy, both.draft_length_options, both.kv_write_gating_threshold) == ("elastic", (5, 10, 15), 0.5)
        lengths = self.made({ELASTIC_DRAFT_LENGTH: "1", KV_GATING_THRESHOLD: ""})
        assert (lengths.policy, lengths.kv_write_gating_threshold) == ("elastic", None)
        gating = self.made({ELASTIC_DRAFT_LENGTH: "0", KV_GATING_THRESHOLD: "0.5"})
        assert (gating.policy, gating.kv_write_gating_threshold) == (DEFAULT_POLICY, 0.5)

    def test_the_ladder_is_that_of_the_configured_length(self) -> None:
        config = self.made({ELASTIC_DRAFT_LENGTH: "1"}, num_speculative_tokens=6)
        assert config.draft_length_options == (2, 4, 6)

    def test_a_threshold_of_ours_comes_first(self) -> None:
        environ = {ELASTIC_DRAFT_LENGTH: "1", CONFIDENCE_THRESHOLD: "0.6"}
        assert self.made(environ).policy == "confidence"
        assert self.made(environ | {ADAPTIVE_DRAFT_LENGTH: "0"}).policy == "elastic"

    def test_a_configured_gate_wins(self) -> None:
        assert self.made({KV_GATING_THRESHOLD: "0.5"}, kv_write_gating_threshold=0.2).kv_write_gating_threshold == 0.2

    def test_looked_up_drafts_have_lengths_but_no_gate(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            config = SpeculativeConfig.parse(
                {"method": "ngram"}, {ELASTIC_DRAFT_LENGTH: "1", KV_GATING_THRESHOLD: "0.5"}
            )
        assert config is not None
        assert (config.policy, config.kv_write_gating_threshold) == ("elastic", None)
        assert KV_GATING_THRESHOLD in caplog.text


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({CONFIDENCE_THRESHOLD: "high"}, f"{CONFIDENCE_THRESHOLD} is 'high'; expected a number from 0 to 1"),
        ({CONFIDENCE_THRESHOLD: "1.5"}, f"{CONFIDENCE_THRESHOLD} is '1.5'"),
        ({CONFIDENCE_THRESHOLD: "nan"}, f"{CONFIDENCE_THRESHOLD} is 'nan'"),
        ({ELASTIC_DRAFT_LENGTH: "2"}, f"{ELASTIC_DRAFT_LENGTH} is '2'; expected 1 or 0"),
        ({KV_GATING_THRESHOLD: "auto"}, f"{KV_GATING_THRESHOLD} is 'auto'; expected a number from 0 to 1$"),
        ({ADAPTIVE_DRAFT_LENGTH: "maybe"}, f"{ADAPTIVE_DRAFT_LENGTH} is 'maybe'; expected 1 or 0"),
    ],
)
def test_a_variable_that_makes_no_sense_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decided(environ)
