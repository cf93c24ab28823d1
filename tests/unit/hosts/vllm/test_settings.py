"""The scheduler's settings: vLLM's ``speculative_config`` and dynaspec's own part, put together or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.hosts.vllm.settings import Settings, VllmSpeculation, drafter_of, k_menu, menu_of, table_of

MODEL = VllmSpeculation(method="draft_model", longest=5, model="drafter", target="target")
NGRAM = VllmSpeculation(method="ngram", longest=4, target="target", lookup=(2, 3))


def read(given: Any = None, host: VllmSpeculation = MODEL, **environ: str) -> Settings:
    return Settings.read(given, host, environ)


def test_nothing_given_means_auto_with_vllm_s_longest_draft() -> None:
    settings = read()
    assert (settings.config.policy, settings.config.num_speculative_tokens) == ("auto", 5)
    assert (settings.config.method, settings.config.model) == ("draft_model", "drafter")
    assert settings.menu == (0, 1, 2, 3, 4, 5)
    assert (settings.fixed, settings.decision_log) == (None, None)


def test_lookups_take_their_bounds_from_vllm() -> None:
    config = read({"policy": "constant"}, NGRAM).config
    assert (config.method, config.model) == ("ngram", None)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 3)


def test_keys_are_dynaspec_s_own_under_all_their_names() -> None:
    settings = read({"disable-by-batch-size": 3, "num_assistant_tokens": 2, "policy": "heuristic"})
    assert settings.config.disable_by_batch_size == 3
    assert settings.config.num_speculative_tokens == 2  # where heuristics start
    assert settings.menu[-1] == 5


def test_the_environment_decides_what_is_left_open() -> None:
    assert read(None, MODEL, VLLM_SPEC_ADAPTIVE_DRAFT_LENGTH="1").config.policy == "elastic"


def test_vllm_s_table_says_which_lengths_have_graphs() -> None:
    host = replace(MODEL, table=((1, 1, 5), (2, 2, 2), (3, 3, 0), (4, 8, 9)))
    assert read(None, host).menu == (0, 2, 5)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash", "medusa"])
def test_methods_that_run_a_model_are_configured_like_a_draft_model(method: str) -> None:
    settings = read({"policy": "constant"}, replace(MODEL, method=method, model=None))
    assert (settings.config.method, settings.config.model) == ("draft_model", "target")
    assert settings.drafter.traits.name == method


def test_a_log_of_its_own_for_every_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "decisions.jsonl")
    assert read({"decision_log": path}).decision_log == Path(path)
    ranked = read({"decision_log": path}, replace(MODEL, ranks=2, rank=1)).decision_log
    assert ranked == tmp_path / "decisions.1.jsonl"


def test_the_log_s_header_rebuilds_the_configuration() -> None:
    settings = read({"policy": "elastic", "draft_length_options": [1, 3]}, replace(MODEL, method="eagle3"))
    header = settings.header
    assert SpeculativeConfig.parse(header["speculative_config"]) == settings.config
    assert (header["host"], header["method"]) == ("vllm", "eagle3")


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (replace(MODEL, ranks=4), "data_parallel_size is 4 and its ranks must draft alike"),
        (replace(NGRAM, method="suffix"), "vLLM's method 'suffix' always drafts the longest length"),
        (replace(MODEL, method="medusa"), "vLLM's method 'medusa' always drafts the longest length"),
    ],
)
def test_where_every_step_drafts_the_longest_length_it_says_why(host: VllmSpeculation, reason: str) -> None:
    settings = read(None, replace(host, table=((1, 1, 2),)))
    assert settings.fixed == reason
    assert settings.menu == tuple(range(host.longest + 1))  # rows can be cut to any length
    assert not settings.drafter.varies


@pytest.mark.parametrize(
    ("host", "alike"),
    [
        (replace(MODEL, on_cpu=True), True),
        (MODEL, False),
        (replace(NGRAM, on_cpu=True), False),  # it finds what it finds
        (replace(MODEL, on_cpu=True, ranks=2), False),
        (replace(MODEL, on_cpu=True, method="medusa"), False),
    ],
)
def test_on_cpus_models_draft_alike_for_all(host: VllmSpeculation, alike: bool) -> None:
    assert read(None, host).alike == alike


@pytest.mark.parametrize(
    ("given", "host", "sentence"),
    [
        ([1], MODEL, "additional_config has dynaspec = [1]; expected a mapping"),
        ({"polcy": "auto"}, MODEL, "speculative_config has no key 'polcy'; did you mean "),
        ({"policy": "best"}, MODEL, "policy is 'best'; expected"),
        ({"method": "ngram"}, MODEL, "method is among dynaspec's settings; expected it in vLLM's speculative_config"),
        ({"speculative_model": "x"}, MODEL, "speculative_model is among dynaspec's settings"),
        ({"num_speculative_tokens": 6}, MODEL, "num_speculative_tokens is 6 but vLLM's speculative_config says 5"),
        ({"decision_log": 3}, MODEL, "decision_log is 3; expected the path of a file"),
        (None, replace(MODEL, longest=65), "vLLM's num_speculative_tokens is 65; expected an integer from 1 to 64"),
        (None, replace(MODEL, method="extract_hidden_states"), "method is 'extract_hidden_states', which"),
        ({"draft_confidence_threshold": 0.5}, NGRAM, "policy is 'confidence' but method is 'ngram', which"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(given: Any, host: VllmSpeculation, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(given, host)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"policy": "confidence"}, "policy is 'confidence', but this host cannot stop between draft passes"),
        (
            {"policy": "elastic", "draft_confidence_threshold": 0.4},
            "draft_confidence_threshold is 0.4, but this host cannot stop between draft passes",
        ),
        (
            {"policy": "elastic", "kv_write_gating_threshold": 0.5},
            "kv_write_gating_threshold is set, but this host's drafter cannot leave out KV writes",
        ),
    ],
)
def test_policies_that_need_more_of_a_drafter_are_refused(given: Any, sentence: str) -> None:
    settings = read(given)
    with pytest.raises(ConfigError) as refused:
        build_controller(settings.config, settings.limits)
    assert str(refused.value) == sentence


# --- lengths and methods ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("longest", "menu"), [(0, (0,)), (1, (0, 1)), (8, tuple(range(9))), (11, (*range(9), 10, 11))])
def test_the_menu_is_dense_where_a_token_matters(longest: int, menu: tuple[int, ...]) -> None:
    assert k_menu(longest) == menu


def test_the_longest_menu_stays_short() -> None:
    assert k_menu(64) == (*range(9), 10, 12, 16, 20, 24, 32, 48, 64)


def test_a_table_names_every_length_and_is_read_back() -> None:
    menu = k_menu(12)
    table = table_of(menu)
    assert [low for low, _, _ in table] == list(range(1, len(menu) + 1))
    assert menu_of(table, 12) == menu


def test_impossible_menus_are_refused() -> None:
    with pytest.raises(ConfigError, match="the longest draft is -1; expected no less than 0"):
        k_menu(-1)


@pytest.mark.parametrize(
    ("method", "options", "passes", "varies"),
    [
        ("ngram", {}, "none", True),
        ("ngram", {"alike": True}, "none", False),
        ("ngram_gpu", {}, "none", False),
        ("suffix", {}, "none", False),
        ("draft_model", {}, "per_token", True),
        ("draft_model", {"parallel": True}, "one", True),
        ("draft_model", {"runner_v2": True}, "one", True),
        ("draft_model", {"alike": True}, "one", False),
        ("eagle3", {"runner_v2": True}, "per_token", True),
        ("dflash", {}, "one", True),
        ("medusa", {}, "one", False),
    ],
)
def test_what_drafts_of_each_method_cost(method: str, options: dict[str, bool], passes: str, varies: bool) -> None:
    drafter = drafter_of(method, **options)
    assert (drafter.traits.passes_per_draft, drafter.varies) == (passes, varies)
    assert drafter.traits.idle_pass == (passes != "none")
    assert not drafter.traits.has_confidence
