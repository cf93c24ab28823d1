"""``Exchanges``: ids, headers, the access log, and what becomes of an application's failure."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dynaspec.server.logs import FIELDS
from dynaspec.server.middleware import Exchanges, HttpMetrics
from support.asgi import exchange

PROMPT = "a secret prompt"


def around(app: ASGIApp, **options: bool) -> Exchanges:
    return Exchanges(app, metrics=HttpMetrics(), **{"access_log": True, "quote": False, **options})


async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError(PROMPT)


async def fails_within(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ValueError(PROMPT)


@pytest.fixture
def lines(caplog):
    """The fields of the access log's lines."""
    caplog.set_level(logging.DEBUG, "dynaspec")
    return lambda: [getattr(record, FIELDS) for record in caplog.records if record.name.endswith(".access")]


@pytest.mark.parametrize("given", ["abc", "A-b_c.1:2", "x" * 128])
async def test_a_sane_request_id_is_kept(given):
    reply = await exchange(around(PlainTextResponse("")), headers={"X-Request-Id": given})
    assert reply.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ä", "a\nb", "<script>"])
async def test_another_is_replaced(given):
    reply = await exchange(around(PlainTextResponse("")), headers={"X-Request-Id": given})
    assert len(reply.headers["x-request-id"]) == 32


async def test_ids_differ():
    app = around(PlainTextResponse(""))
    assert len({(await exchange(app)).headers["x-request-id"] for _ in range(3)}) == 3


async def test_the_application_knows_the_id():
    async def tell(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(scope["state"]["request_id"])(scope, receive, send)

    reply = await exchange(around(tell))
    assert reply.body.decode() == reply.headers["x-request-id"]


async def test_answers_have_safe_headers_unless_they_say_otherwise():
    reply = await exchange(around(PlainTextResponse("", headers={"X-Frame-Options": "SAMEORIGIN"})))
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["x-frame-options"] == "SAMEORIGIN"


async def test_a_failure_is_told_without_what_the_caller_sent(caplog, lines):
    reply = await exchange(around(fails), path="/v1/x")
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert reply.headers["x-request-id"] in reply.error["message"]
    assert PROMPT not in caplog.text + reply.body.decode()
    assert "test_exchange.py" in caplog.text
    assert "ValueError" in caplog.text
    assert lines()[0]["status"] == 500


async def test_where_prompts_may_be_logged_errors_are_quoted(caplog):
    await exchange(around(fails, quote=True))
    assert PROMPT in caplog.text


async def test_half_an_answer_stays_half(lines):
    reply = await exchange(around(fails_within))
    assert (reply.status, reply.complete) == (200, False)
    assert lines()[0]["complete"] is False


async def test_the_access_log_has_a_line(lines):
    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["usage"] = SimpleNamespace(prompt_tokens=3, completion_tokens=5)
        await PlainTextResponse("")(scope, receive, send)

    reply = await exchange(around(count), "POST", "/v1/x", headers={"Authorization": "Bearer sk-x"})
    (line,) = lines()
    assert line.pop("seconds") >= 0
    assert line == {
        "request_id": reply.headers["x-request-id"],
        "method": "POST",
        "path": "/v1/x",
        "status": 200,
        "prompt_tokens": 3,
        "completion_tokens": 5,
    }


async def test_a_client_that_left_is_logged_so(lines):
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    await exchange(around(nothing))
    assert (lines()[0]["status"], lines()[0]["complete"]) == (499, False)


async def test_a_stream_is_logged_when_it_has_ended(lines):
    async def pieces():
        assert lines() == []
        yield b"1"
        yield b"2"

    reply = await exchange(around(StreamingResponse(pieces())))
    assert reply.body == b"12"
    assert len(lines()) == 1
    assert "complete" not in lines()[0]


@pytest.mark.parametrize(
    ("path", "status", "level"), [("/health", 200, "DEBUG"), ("/health", 503, "INFO"), ("/x", 200, "INFO")]
)
async def test_probes_that_succeed_are_quiet(caplog, path, status, level):
    caplog.set_level(logging.DEBUG, "dynaspec")
    await exchange(around(PlainTextResponse("", status)), path=path)
    assert [record.levelname for record in caplog.records] == [level]


async def test_the_access_log_can_be_off(lines):
    await exchange(around(PlainTextResponse(""), access_log=False))
    assert lines() == []
