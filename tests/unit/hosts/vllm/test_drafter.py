"""The drafter as vLLM's runner holds it: a fault of it costs no request."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.hosts.vllm import Drafter
from dynaspec.hosts.vllm.drafting import build_drafting

MODELS = Path(__file__).resolve().parents[3] / "models"


def config(told: Any, *, vocab: int = 4096, **parallel: int) -> SimpleNamespace:
    """What is read of vLLM's configuration."""
    return SimpleNamespace(
        additional_config={"dynaspec": told},
        model_config=SimpleNamespace(
            max_model_len=96, model="target", dtype="torch.float32", get_vocab_size=lambda: vocab
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(**{"world_size": 1, "data_parallel_size": 1, **parallel}),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=SimpleNamespace(num_speculative_tokens=6),
    )


class Spy:
    def __init__(self) -> None:
        self.rows: list[int | None] = []

    def propose(self, sampled: Any, lengths: Any, tokens: Any, pass_rows: int | None) -> list[list[int]]:
        self.rows.append(pass_rows)
        if len(self.rows) > 4:
            raise RuntimeError("a fault of the drafter's")
        return [[1]] * len(sampled)


@pytest.fixture
def some_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a vLLM that will do were installed."""
    monkeypatch.setattr("dynaspec.hosts.vllm.check_vllm", lambda: "0.32.0")


def test_without_vllm_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"^vLLM is not installed; expected one of 0\.32 and 0\.33"):
        Drafter(None)


@pytest.mark.usefixtures("some_vllm")
def test_before_a_model_is_loaded_nothing_is_drafted() -> None:
    assert Drafter(None).propose([[1], []], None, None) == [[], []]


@pytest.mark.usefixtures("some_vllm")
def test_rows_are_read_off_the_pass_and_a_fault_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter, spy = Drafter(None), Spy()
    monkeypatch.setattr("dynaspec.hosts.vllm.drafting.build_drafting", lambda config, clock: spy)
    drafter.load_model(None)
    for slots in ({"layer": np.zeros(7), "other": np.zeros(7)}, {}, None, [{"layer": np.zeros(3)}]):
        assert drafter.propose([[5], [6]], None, None, slots) == [[1], [1]]
    assert spy.rows == [7, None, None, None]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert drafter.propose([[5], [6]], None, None) == [[], []]
    assert [record.getMessage() for record in caplog.records] == [
        "dynaspec's drafter has failed; from now on vLLM decodes plainly"
    ]


@pytest.mark.parametrize(
    "told",
    [
        {"method": "draft_model", "model": str(MODELS / "draft"), "policy": "constant", "num_speculative_tokens": 3},
        {"method": "ngram", "policy": "constant", "prompt_lookup_max": 3, "num_speculative_tokens": 3},
        {"model": str(MODELS / "draft")},
    ],
    ids=["model", "look-up", "auto"],
)
def test_it_is_built_from_vllm_s_configuration(told: dict[str, Any]) -> None:
    clock = iter(range(10**9))
    drafting = build_drafting(config(told), lambda: 1e-3 * next(clock))
    texts = np.tile(np.arange(10, 20, dtype=np.int32), (3, 9))
    made = []
    for step in range(12):
        lengths = np.array([30 + step, 40 + step, 0])
        made += drafting.propose([[int(texts[0, 29 + step])], [int(texts[1, 39 + step])], []], lengths, texts, 2)
        assert made[-1] == []  # still reads its prompt
    assert max(map(len, made)) == 3 if "policy" in told else max(map(len, made)) > 0


def test_what_cannot_be_built_is_refused_with_a_sentence() -> None:
    model = {"model": str(MODELS / "draft")}
    for given, parallel, words in (
        (model, {"vocab": 100}, "has a vocabulary of 4096 tokens but vLLM's model has 100"),
        (model, {"world_size": 2}, "vLLM runs 2 workers; expected one for dynaspec's drafter"),
        (model, {"data_parallel_size": 4}, "vLLM runs 4 workers; expected one for dynaspec's drafter"),
        (model | {"num_speculative_tokens": 7}, {}, "num_speculative_tokens is 7 but vLLM's speculative_config says 6"),
        (model | {"draft_sample_method": "probabilistic"}, {}, "draft_sample_method is 'probabilistic'"),
        (model | {"rejection_sample_method": "synthetic"}, {}, "rejection_sample_method is 'synthetic' among"),
        (model | {"decision_log": 3}, {}, "decision_log is 3; expected the path of a file"),
        ([1], {}, "additional_config has dynaspec = [1]; expected a mapping"),
    ):
        with pytest.raises(ConfigError) as refused:
            build_drafting(config(given, **parallel), lambda: 0.0)
        assert words in str(refused.value)
