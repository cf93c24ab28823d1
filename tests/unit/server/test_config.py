"""``ServerConfig``: what it takes, what it refuses and in which words, and that it keeps secrets."""

from __future__ import annotations

import logging

import pytest
from pydantic import ValidationError

from dynaspec.contract.errors import ConfigError
from dynaspec.server.config import API_KEY_VARIABLE, ServerConfig

SECRET = "sk-very-secret"


def build(**options: object) -> ServerConfig:
    return ServerConfig.build({}, **options)


def test_defaults_are_local_and_open_nothing():
    config = build()
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.allowed_origins == ()
    assert not config.log_requests


def test_it_is_frozen():
    with pytest.raises(ValidationError):
        build().port = 1


def test_values_may_come_as_text():
    config = build(port="80", max_request_bytes="5M", request_timeout_s="1.5", access_log="false")
    assert (config.port, config.max_request_bytes, config.request_timeout_s) == (80, 5 * 2**20, 1.5)
    assert config.access_log is False


@pytest.mark.parametrize("given", ["a", ["a", "b"], ("a",), '["a", "b"]', ['["a", "b"]']])
def test_several_names(given):
    names = build(served_model_name=given).served_model_name
    assert names in (("a",), ("a", "b"))
    assert len(names) == (2 if "b" in str(given) else 1)


def test_a_name_given_twice_counts_once():
    assert build(served_model_name=["a", "b", "a"]).served_model_name == ("a", "b")


def test_keys_from_the_environment_count_where_no_option_is_given():
    environ = {API_KEY_VARIABLE: "one, two"}
    assert [key.get_secret_value() for key in ServerConfig.build(environ).api_key] == ["one", "two"]
    assert [key.get_secret_value() for key in ServerConfig.build(environ, api_key=["three"]).api_key] == ["three"]
    assert ServerConfig.build({API_KEY_VARIABLE: ""}).api_key == ()


def test_no_key_shows(caplog):
    config = build(api_key=[SECRET])
    logging.getLogger("test").warning("%s %r", config, config)
    shown = f"{config} {config!r} {config.model_dump()} {config.model_dump_json()} {caplog.text}"
    assert SECRET not in shown


@pytest.mark.parametrize(
    "wrong", [[f"{SECRET} with spaces"], [f"{SECRET}ä"], [""], [SECRET, {SECRET: 1}], f'["{SECRET}']
)
def test_no_refused_key_shows(wrong):
    with pytest.raises(ConfigError) as caught:
        build(api_key=wrong)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "api_key" in str(caught.value)


def test_a_chat_template_is_text_or_the_file_that_holds_it(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }} ü", "utf-8")
    assert build(chat_template="{{ messages }} ü").chat_template == "{{ messages }} ü"
    assert build(chat_template=str(file)).chat_template == "{{ messages }} ü"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 65536}, "port: .*65536"),
        ({"port": "x"}, "port: .*'x'"),
        ({"prot": 1}, "unknown option 'prot'; expected one of .*port"),
        ({"host": ""}, "host"),
        ({"root_path": "llm"}, "root_path: 'llm' .*begins"),
        ({"root_path": "/llm/"}, "root_path: '/llm/'"),
        ({"max_request_bytes": "much"}, "max_request_bytes: 'much' is not a size"),
        ({"max_queued_requests": -1}, "max_queued_requests: .*-1"),
        ({"request_timeout_s": 0}, "request_timeout_s: .*0"),
        ({"drain_timeout_s": "inf"}, "drain_timeout_s: inf is no time"),
        ({"drain_timeout_s": "nan"}, "drain_timeout_s"),
        ({"chat_template": "nowhere.jinja"}, "chat_template: 'nowhere.jinja' is neither"),
        ({"ssl_certfile": "nowhere.pem"}, "ssl_certfile: there is no file 'nowhere.pem'"),
        ({"log_format": "xml"}, "log_format: .*'text' or 'json'.*'xml'"),
        ({"metrics_namespace": "other"}, "metrics_namespace: .*'other'"),
        ({"otlp_traces_endpoint": "localhost:4317"}, "otlp_traces_endpoint: 'localhost:4317' .*http://"),
        ({"served_model_name": ["a", " "]}, "served_model_name: .*empty"),
        ({"allowed_origins": "[1"}, "allowed_origins: .*JSON list"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, "allow_credentials .*origins by name"),
    ],
)
def test_what_cannot_work_is_told_in_one_sentence(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build(**options)
    assert "\n" not in str(caught.value)


def test_a_key_or_authorities_need_a_certificate(tmp_path):
    file = tmp_path / "x.pem"
    file.touch()
    for name in ("ssl_keyfile", "ssl_ca_certs"):
        with pytest.raises(ConfigError, match="without ssl_certfile"):
            build(**{name: str(file)})


def test_every_field_says_what_it_is():
    for name, field in ServerConfig.model_fields.items():
        assert field.description, name
        assert isinstance(field.json_schema_extra, dict), name
        assert field.json_schema_extra["group"], name
