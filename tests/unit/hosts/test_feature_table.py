"""The tables of ``docs/scale-out.md`` are what the hosts accept and refuse."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaspec.cli.vllm_backend import REFUSED as REFUSED_FLAGS
from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.contract.methods import METHODS
from dynaspec.contract.sampling_params import SamplingParams, StructuredOutputsParams
from dynaspec.contract.step import Limits
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import POLICIES, build_controller
from dynaspec.engine import build
from dynaspec.engine.config import EngineConfig
from dynaspec.hosts.transformers import Session
from dynaspec.hosts.transformers.setup import Setup, resolve_setup
from dynaspec.hosts.vllm import launch
from dynaspec.hosts.vllm.drafting import limits_of as own_limits
from dynaspec.hosts.vllm.launch import BACKEND_KEY
from dynaspec.hosts.vllm.llm_request import vllm_params
from dynaspec.hosts.vllm.settings import Settings, VllmSpeculation

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scale-out.md").read_text("utf-8")
ROWS = re.findall(r"^\| `(\{.*?\})` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
PARAMETERS = dict(re.findall(r"^\| `(\w+)` \| ((?:yes|no)\b.*?) \|$", PAGE, re.MULTILINE))
HOST_TABLE = PAGE.partition("\n| | embedded | vLLM, its drafters | vLLM, dynaspec's drafter | Transformers |\n")[
    2
].partition("\n\n")[0]
WHAT_HOSTS_ARE = {
    name: answers
    for name, *answers in re.findall(r"^\| ([^|]+?) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", HOST_TABLE, re.MULTILINE)
}
SEEN_BY_RUNNING = {"devices", "output of greedy requests", "seeded sampling is that of plain decoding", "metrics"}
"""Rows that ``tests/exactness``, ``tests/unit/hosts/transformers`` and ``tests/hosts/vllm`` are about."""
VALUES: dict[str, Any] = {
    "max_draft_tokens": 2,
    "speculation_metrics": "detailed",
    "truncate_prompt_tokens": 3,
    "structured_outputs": StructuredOutputsParams(json_object=True),
    "expected_acceptance": 0.5,
    "min_p": 0.1,
    "logit_bias": {3: 1.0},
}


def embedded(config: dict[str, Any]) -> None:
    SpeculativeConfig.parse(config, {})


def vllm(config: dict[str, Any]) -> None:
    launch.engine_arguments("target", config, {}, {})


def own_drafter(config: dict[str, Any]) -> None:
    launch.engine_arguments("target", config | {BACKEND_KEY: "dynaspec"}, {}, {})


def transformers(config: dict[str, Any]) -> None:
    setup = transformers_setup(config)
    build_controller(setup.config, setup.limits)


def transformers_setup(config: dict[str, Any]) -> Setup:
    model = SimpleNamespace(name_or_path="target", generation_config=None)
    drafter = SimpleNamespace(name_or_path="drafter", generation_config=None)
    return resolve_setup(config, model, None if config.get("method") in ("ngram", "suffix") else drafter, {})


HOSTS: tuple[Callable[[dict[str, Any]], None], ...] = (embedded, vllm, own_drafter, transformers)


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the profile is that a row names, and vLLM is not."""
    shutil.copy(ROOT / "tests" / "unit" / "control" / "h100_profile.json", tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "find_spec", lambda name: None)


@pytest.mark.parametrize(("keys", "answers"), [(keys, answers) for keys, *answers in ROWS])
def test_a_row_is_what_the_hosts_say(keys: str, answers: list[str]) -> None:
    given = json.loads(keys)
    config = given if given.keys() & {"model", "method"} else {"model": "drafter", **given}
    assert [answer.split(":")[0] for answer in answers] == [_answer(host, config) for host in HOSTS]


def _answer(host: Callable[[dict[str, Any]], None], config: dict[str, Any]) -> str:
    try:
        host(config)
    except ConfigError:
        return "no"
    return "yes"


def test_every_policy_has_a_row() -> None:
    assert {json.loads(keys).get("policy") for keys, *_ in ROWS} - {None} == POLICIES.keys()


def limits() -> tuple[Limits, Limits, Limits, Limits]:
    """What each host can carry out with a draft model."""
    return (
        build._limits(None, (), EngineConfig(model="target")),
        on_vllm().limits,
        own_limits(METHODS["draft_model"].traits),
        transformers_setup({"model": "drafter"}).limits,
    )


def on_vllm(**host: Any) -> Settings:
    return Settings.read(None, VllmSpeculation("draft_model", longest=4, model="drafter", **host), {})


def test_every_row_about_hosts_is_looked_at() -> None:
    looked_at = {
        *("length of a draft", "drafts end early", "steps of plain decoding"),
        *("decision log, `dynaspec explain`", "live page"),
    }
    assert WHAT_HOSTS_ARE.keys() == SEEN_BY_RUNNING | looked_at


def test_drafts_end_early_where_hosts_can_stop_them() -> None:
    assert [told == "yes" for told in WHAT_HOSTS_ARE["drafts end early"]] == [one.can_stop for one in limits()]


def test_drafters_keep_up_with_plain_decoding_on_vllm_alone() -> None:
    told = [answer.startswith("the drafter keeps up") for answer in WHAT_HOSTS_ARE["steps of plain decoding"]]
    _, vllm, _, transformers = limits()
    own = METHODS["draft_model"].traits.idle_pass
    found = [own, vllm.proposers[0].idle_pass, own, transformers.proposers[0].idle_pass]
    assert told == found == [False, True, False, False]


def test_lengths_are_each_request_s_own_but_on_vllm_s_cpus() -> None:
    told = WHAT_HOSTS_ARE["length of a draft"]
    assert told[0] == "each request its own"
    assert told[1] == "one a batch; verified by request, on CPUs alike for all"
    assert told[2] == "each request its own"
    assert all(one.ragged for one in limits())
    assert [on_vllm(on_cpu=on_cpu).alike for on_cpu in (False, True)] == [False, True]


def test_every_host_writes_decision_logs() -> None:
    assert WHAT_HOSTS_ARE["decision log, `dynaspec explain`"] == ["yes", "yes", "yes", "yes"]
    assert EngineConfig(model="target", decision_log="a").decision_log == "a"
    settings = launch.engine_arguments("target", {"model": "drafter"}, {"decision_log": "a"}, {})["additional_config"]
    assert settings["dynaspec"]["decision_log"] == "a"
    Session(decision_log="a")


def test_the_live_page_is_the_embedded_engine_s() -> None:
    assert [told == "yes" for told in WHAT_HOSTS_ARE["live page"]] == [
        True,
        "enable_dashboard" not in REFUSED_FLAGS,
        "enable_dashboard" not in REFUSED_FLAGS,
        False,
    ]


def test_the_parameters_of_requests() -> None:
    assert PARAMETERS.keys() == VALUES.keys()
    for name, told in PARAMETERS.items():
        refused = [speculates for speculates in (False, True) if _refuses(name, speculates)]
        expected = [True] if "while speculating" in told else [False, True] if told.startswith("no") else []
        assert refused == expected, name


def _refuses(name: str, speculates: bool) -> bool:
    try:
        vllm_params(SamplingParams(**{name: VALUES[name]}), speculates=speculates)
    except RequestError:
        return True
    return False


def test_flags_that_are_refused_are_named() -> None:
    named = set(re.findall(r"`--([a-z-]+)[ `]", "".join(line for line in PAGE.splitlines() if "| refused" in line)))
    assert named | {"device"} == {
        name.replace("_", "-") for name in REFUSED_FLAGS if name != "shutdown_on_engine_death"
    }
