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
from dynaspec.contract.sampling_params import SamplingParams, StructuredOutputsParams
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import POLICIES, build_controller
from dynaspec.hosts.transformers.setup import resolve_setup
from dynaspec.hosts.vllm import launch
from dynaspec.hosts.vllm.llm_params import vllm_params

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scale-out.md").read_text("utf-8")
ROWS = re.findall(r"^\| `(\{.*?\})` \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
PARAMETERS = dict(re.findall(r"^\| `(\w+)` \| ((?:yes|no)\b.*?) \|$", PAGE, re.MULTILINE))
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


def transformers(config: dict[str, Any]) -> None:
    model = SimpleNamespace(name_or_path="target", generation_config=None)
    drafter = SimpleNamespace(name_or_path="drafter", generation_config=None)
    setup = resolve_setup(config, model, None if config.get("method") == "ngram" else drafter, {})
    build_controller(setup.config, setup.limits)


HOSTS: tuple[Callable[[dict[str, Any]], None], ...] = (embedded, vllm, transformers)


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
