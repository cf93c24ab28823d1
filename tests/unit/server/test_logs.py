"""The log's two forms, and tracebacks that quote nobody."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from dynaspec.server.config import ServerConfig
from dynaspec.server.logs import FIELDS, JsonFormatter, TextFormatter, configure_logging, describe, request_log


def record(message: str, fields: dict[str, Any] | None = None, error: Exception | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("dynaspec.x", logging.WARNING, "x.py", 1, message, (), info)
    made.created = 1_700_000_000.5
    if fields is not None:
        setattr(made, FIELDS, fields)
    return made


def test_text_has_one_line():
    line = TextFormatter().format(record("done", {"status": 200, "path": "/a b", "id": "x\ny", "quote": 'a"b'}))
    assert line == '2023-11-14T22:13:20.500Z WARNING done status=200 path="/a b" id="x\\ny" quote="a\\"b"'


def test_json_has_one_object_a_line():
    line = JsonFormatter().format(record("done\nü", {"status": 200, "path": "/a b"}))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.500Z",
        "level": "warning",
        "logger": "dynaspec.x",
        "message": "done\nü",
        "status": 200,
        "path": "/a b",
    }


def test_exceptions_are_in_both():
    try:
        raise ValueError("why")
    except ValueError as error:
        failed = record("failed", error=error)
    assert "ValueError: why" in TextFormatter().format(failed)
    assert "ValueError: why" in json.loads(JsonFormatter().format(failed))["exception"]


def nested() -> ExceptionGroup:
    """A group of an error with a cause; every message is secret."""
    try:
        try:
            raise KeyError("secret")
        except KeyError as error:
            raise ValueError("secret") from error
    except ValueError as error:
        inner = error
    try:
        raise ExceptionGroup("secret", [inner])
    except ExceptionGroup as error:
        return error


def test_a_traceback_without_messages_says_where_and_what():
    text = describe(nested(), message=False)
    assert "secret" not in text.replace('raise KeyError("secret")', "").replace(
        'raise ValueError("secret")', ""
    ).replace('raise ExceptionGroup("secret", [inner])', "")  # lines of the source, which are nobody's
    for name in ("ExceptionGroup", "ValueError", "KeyError"):
        assert f"builtins.{name}" in text
    assert "test_logs.py" in text


def test_a_traceback_with_messages_is_the_usual_one():
    assert "KeyError: 'secret'" in describe(nested(), message=True)


def test_requests_are_logged_only_if_wanted(caplog):
    assert request_log(ServerConfig()) is None
    log = request_log(ServerConfig(log_requests=True, max_log_len=5))
    assert log is not None
    caplog.set_level(logging.INFO, "dynaspec")
    log({"state": {"request_id": "x"}}, "wörter".encode())
    assert getattr(caplog.records[0], FIELDS) == {"request_id": "x", "body": "wörte…"}


@pytest.fixture
def root_log():
    """Puts back what ``configure_logging`` changes."""
    root, names = logging.getLogger(), ("dynaspec", "dynaspec.observe.format")
    before = root.handlers[:], root.level, [logging.getLogger(name).level for name in names]
    root.handlers.clear()  # or pytest's would be closed
    yield root
    root.handlers[:], root.level = before[0], before[1]
    for name, level in zip(names, before[2], strict=True):
        logging.getLogger(name).setLevel(level)


def test_the_process_s_log_goes_to_stderr(root_log, capsys):
    configure_logging(ServerConfig(log_format="json", log_stats=False))
    logging.getLogger("dynaspec.x").info("hello")
    logging.getLogger("dynaspec.observe.format").info("statistics")
    logging.getLogger("other").info("not ours")
    logging.getLogger("other").warning("worth knowing")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["message"] for line in captured.err.splitlines()] == ["hello", "worth knowing"]
    assert root_log.handlers[0].stream is sys.stderr
