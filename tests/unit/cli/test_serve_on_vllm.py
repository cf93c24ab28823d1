"""``dynaspec serve --backend vllm``: what vLLM's parser is given. Running servers are in ``tests/hosts/vllm``."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dynaspec.cli.vllm_backend import LISTS, REFUSED, SAME, TRANSLATED, backend_of, handed_over, read
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.config import EngineConfig
from dynaspec.server.config import ServerConfig


def seen(**values: Any) -> SimpleNamespace:
    """What vLLM's parser would make of the arguments that are passed."""
    nothing = {"model_tag": None, "speculative_config": None, "additional_config": {}, "scheduler_cls": None}
    sizes = dict.fromkeys(("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"), 1)
    return SimpleNamespace(**{**nothing, **sizes, **values})


def told(*arguments: str, environ: dict[str, str] | None = None, **values: Any) -> list[str]:
    given = {"model_tag": arguments[0] if arguments and not arguments[0].startswith("-") else None, **values}
    return handed_over(read(arguments, environ or {}), seen(**given))


def after(arguments: list[str], flag: str) -> Any:
    return json.loads(arguments[arguments.index(flag) + 1])


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


def test_every_option_of_dynaspec_s_server_has_its_place():
    special = {"model", "speculative_config", "decision_log"}
    tables = [SAME, TRANSLATED.keys(), LISTS.keys(), REFUSED.keys(), special]
    ours = EngineConfig.model_fields.keys() | ServerConfig.model_fields.keys() | {"demo"}
    assert set().union(*tables) == ours
    assert sum(map(len, tables)) == len(ours)


def test_what_is_vllm_s_passes_as_it_is():
    words = ["m", "-tp", "2", "--port", "80", "--quantization", "awq", "-O3", "--compilation-config.mode", "3"]
    assert told(*words) == words


def test_underscores_are_dashes():
    assert told("m", "--served_model_name=a_b") == ["m", "--served-model-name", "a_b"]
    assert told("m", "--max_num_seqs=4") == ["m", "--max-num-seqs=4"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--disable-docs"], ["--disable-fastapi-docs"]),
        (["--no-access-log", "--log-stats"], ["--disable-uvicorn-access-log", "--no-disable-log-stats"]),
        (["--kv-cache-memory", "1G"], ["--kv-cache-memory-bytes", str(2**30)]),
        (["--drain-timeout-s", "2.5"], ["--shutdown-timeout", "3"]),
        (["--api-key", "a", "--api-key", "b"], ["--api-key", "a", "b"]),
        (["--served-model-name", "a", "b"], ["--served-model-name", "a", "b"]),
        (["--allowed-origins", "http://x"], ["--allowed-origins", '["http://x"]']),
        (["--allowed-origins", '["*"]'], ["--allowed-origins", '["*"]']),
        (["--no-enable-dashboard", "--log-format", "text", "--device", "auto"], []),
    ],
)
def test_options_under_other_names(given, expected):
    assert sorted(told("m", *given)) == sorted(["m", *expected])


def test_speculation_is_divided():
    arguments = told("m", "--draft-model", "d", "--num-speculative-tokens", "2", "--decision-log", "log.jsonl")
    assert arguments[0] == "m"
    assert after(arguments, "--speculative-config").items() >= {"model": "d", "num_speculative_tokens": 2}.items()
    assert arguments[arguments.index("--scheduler-cls") + 1] == "dynaspec.hosts.vllm.Scheduler"
    assert after(arguments, "--additional-config") == {"dynaspec": {"policy": "auto", "decision_log": "log.jsonl"}}


def test_speculation_as_json_beside_what_other_plugins_are_told():
    more = '{"other": {"x": 1}}'
    arguments = told("m", "-sc", '{"method": "ngram", "policy": "constant"}', "--additional-config", more)
    assert after(arguments, "--additional-config") == {"other": {"x": 1}, "dynaspec": {"policy": "constant"}}


def test_without_speculation_nothing_is_added():
    assert told("m", "--scheduler-cls", "a.B", scheduler_cls="a.B") == ["m", "--scheduler-cls", "a.B"]


def test_a_file_s_options_and_those_that_win_over_them(file):
    path = file("""
backend: vllm
model: in/file
port: 80
max-num-seqs: 3
draft-model: d
api-key: [a, b]
enforce-eager: true
access-log: false
hf-overrides: {x: 1}
stop-nothing:
""")
    arguments = told("--config", path, "--port", "81")
    assert arguments[0] == "in/file"
    assert "80" not in arguments
    assert arguments[arguments.index("--max-num-seqs") + 1] == "3"
    assert arguments[arguments.index("--api-key") :][:3] == ["--api-key", "a", "b"]
    assert {"--enforce-eager", "--disable-uvicorn-access-log"} <= set(arguments)
    assert after(arguments, "--hf-overrides") == {"x": 1}
    assert after(arguments, "--speculative-config")["model"] == "d"
    assert told("argument", "--config", path)[0] == "argument"


def test_the_backend_is_an_option_or_a_key(file):
    assert backend_of(["m"]) == "dynaspec"
    assert backend_of(["m", "--backend", "vllm"]) == backend_of(["--backend=vllm"]) == "vllm"
    assert backend_of(["--config", file("backend: vllm")]) == "vllm"
    assert backend_of(["--config", file("backend: vllm"), "--backend", "dynaspec"]) == "dynaspec"
    with pytest.raises(ConfigError, match="--backend is 'x'; expected 'dynaspec' or 'vllm'"):
        backend_of(["--backend", "x"])


def test_keys_come_from_the_environment_and_are_not_shown():
    request = read(["m"], {"DYNASPEC_API_KEY": "sesame, second"})
    arguments = handed_over(request, seen(model_tag="m"))
    assert arguments == ["m", "--api-key", "sesame", "second"]
    assert request.shown(arguments) == "m --api-key '***' '***'".replace("'", "")
    assert read(["m", "--api-key", "x"], {"DYNASPEC_API_KEY": "sesame"}).secrets == {"x"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no model was given"),
        (["m", "--model", "n"], "the model is 'm' and --model is 'n'"),
        (["m", "--request-timeout-s", "3"], "--request-timeout-s 3 is not available"),
        (["m", "--max-queued-requests=3"], "--max-num-queued-reqs"),
        (["--demo"], "--demo is not available"),
        (["m", "--enable-dashboard"], "--enable-dashboard is not available"),
        (["m", "--no-shutdown-on-engine-death"], "--no-shutdown-on-engine-death is not available"),
        (["m", "--log-format", "json"], "expected text, or nothing"),
        (["m", "--device", "cuda"], "expected auto, or nothing"),
        (["m", "--kv-cache-memory", "much"], "--kv-cache-memory is 'much', which cannot be read"),
        (["m", "--drain-timeout-s", "soon"], "--drain-timeout-s is 'soon'"),
        (["m", "--draft-model", "d", "--speculative-config", "{}"], "one or the other"),
        (["m", "--draft-model", "d", "--num-speculative-tokens", "many"], "num_speculative_tokens is 'many'"),
        (["m", "--draft-model", "d", "--policy", "confidence"], "cannot stop between draft passes"),
        (["m", "--additional-config", "[]"], "expected a JSON object"),
        (["m", "--decision-log", "x"], "nothing speculates"),
        (["m", "--draft-model"], "expected one argument"),
        (["m", "--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments, words):
    with pytest.raises(ConfigError) as caught:
        told(*arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["speculative_config", "additional_config"])
def test_objects_in_parts_are_refused(name):
    with pytest.raises(ConfigError, match="expected it as one JSON object"):
        told("m", **{name: {"x": 1}})


def test_the_command_line_reaches_it(dynaspec, monkeypatch):
    given = []
    monkeypatch.setattr("dynaspec.cli.serve.serve_on_vllm", given.append)
    assert dynaspec("serve", "m", "--backend", "vllm", "--quantization", "awq").code == 0
    assert given == [["m", "--backend", "vllm", "--quantization", "awq"]]


def test_help_is_dynaspec_s_own(dynaspec):
    assert "--backend" in dynaspec("serve", "--backend", "vllm", "-h").out


def test_without_vllm_one_line_says_how_to_get_it(dynaspec, monkeypatch):
    monkeypatch.setattr("dynaspec.hosts.vllm.launch.find_spec", lambda name: None)
    result = dynaspec("serve", "m", "--backend", "vllm")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "pip install vllm" in result.err


def test_the_embedded_backend_may_be_named(dynaspec):
    assert "no model was given" in dynaspec("serve", "--backend", "dynaspec").err
