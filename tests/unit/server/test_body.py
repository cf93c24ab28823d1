"""``BoundedBody``: what is too large or too slow does not reach the application."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from dynaspec.server.middleware import BoundedBody
from support.asgi import exchange

LIMIT = 10


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the body; says whether the client has left after it."""
    request = Request(scope, receive)
    body = await request.body()
    response: Response = PlainTextResponse(
        body + (b" left" if scope["path"] == "/wait" and await left(receive) else b"")
    )
    await response(scope, receive, send)


async def left(receive: Receive) -> bool:
    return (await receive())["type"] == "http.disconnect"


def bounded(timeout_s: float = 60.0, **options: object) -> BoundedBody:
    return BoundedBody(echo, limit=LIMIT, timeout_s=timeout_s, **options)


@pytest.mark.parametrize("pieces", [[b"0123456789"], [b"01234", b"56789"], [bytes([digit]) for digit in b"0123456789"]])
async def test_a_body_arrives_whole(pieces):
    reply = await exchange(bounded(), "POST", body=pieces)
    assert (reply.status, reply.body) == (200, b"0123456789")


async def test_without_a_body_nothing_is_waited_for():
    reply = await exchange(bounded(), "GET", ends=True)
    assert (reply.status, reply.body) == (200, b"")
    reply = await exchange(bounded(), "POST", headers={"Content-Length": "0"})
    assert reply.status == 200


async def test_what_says_that_it_is_too_large_is_not_read():
    reply = await exchange(bounded(), "POST", headers={"Content-Length": "11"}, body=[b"0"], ends=False)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert "10 bytes" in reply.error["message"]


async def test_what_turns_out_to_be_too_large_is_refused_before_its_end():
    reply = await exchange(bounded(), "POST", body=[b"0123456789", b"0"], ends=False)
    assert reply.status == 413


async def test_what_does_not_arrive_is_given_up():
    reply = await exchange(bounded(timeout_s=0.01), "POST", body=[b"0"], ends=False)
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (408, "request_timeout", "close")


async def test_a_client_that_leaves_is_not_answered():
    reply = await exchange(bounded(), "POST", body=[b"0"], ends=False, leaves=True)
    assert reply.status is None


async def test_the_application_still_hears_that_the_client_leaves():
    reply = await exchange(bounded(), "POST", "/wait", body=[b"0"], leaves=True)
    assert reply.body == b"0 left"


async def test_bodies_are_shown_to_who_wants_to_see_them():
    shown = []
    await exchange(
        bounded(seen=lambda scope, body: shown.append((scope["path"], body))), "POST", "/x", body=[b"0", b"1"]
    )
    assert shown == [("/x", b"01")]
