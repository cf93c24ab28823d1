"""``ApiKeys``: which requests need a key, and which keys are valid."""

from __future__ import annotations

from hmac import compare_digest
from unittest import mock

import pytest
from pydantic import SecretStr
from starlette.responses import PlainTextResponse

from dynaspec.server.middleware import ApiKeys
from support.asgi import exchange

APP = ApiKeys(PlainTextResponse("in"), keys=[SecretStr("first"), SecretStr("second"), SecretStr("third")])


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/v1/chat/completions", "/tokenize", "/detokenize", "/dashboard/feed", "/nowhere"),
        *("/health/x", "/dashboard/staticx", "/V1/models", "//health", "/v1/../health", "/health\n"),
    ],
)
async def test_a_key_is_needed(path):
    reply = await exchange(APP, path=path)
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.error["type"] == "authentication_error"
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/ping", "/version", "/metrics", "/openapi.json", "/", "/dashboard"]
)
async def test_no_key_is_needed(path):
    assert (await exchange(APP, path=path)).status == 200


async def test_the_page_s_files_are_open():
    assert (await exchange(APP, path="/dashboard/static/js/page.js")).status == 200


@pytest.mark.parametrize("header", ["Bearer first", "Bearer second", "Bearer third", "bearer  third "])
async def test_every_key_is_valid(header):
    assert (await exchange(APP, path="/v1/models", headers={"Authorization": header})).status == 200


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer firs", "Bearer firstx", "first", "Basic first", "Bearer First", "Bearer ü"],
)
async def test_nothing_else_is(header):
    reply = await exchange(APP, path="/v1/models", headers={"Authorization": header})
    assert reply.status == 401
    assert "first" not in str(reply.body)


async def test_all_keys_are_compared_even_after_a_match():
    with mock.patch("dynaspec.server.middleware.hmac.compare_digest", side_effect=compare_digest) as compare:
        await exchange(APP, path="/v1/models", headers={"Authorization": "Bearer first"})
    assert compare.call_count == 3
    assert {len(side) for call in compare.call_args_list for side in call.args} == {32}  # whatever the keys' lengths


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models"])
async def test_below_a_root_path_a_key_is_needed_too(path):
    assert (await exchange(APP, path=path, root_path="/llm")).status == 401


async def test_below_a_root_path_health_is_open():
    assert (await exchange(APP, path="/llm/health", root_path="/llm")).status == 200
    assert (await exchange(APP, path="/llmx/health", root_path="/llm")).status == 401


async def test_the_body_is_not_read():
    reply = await exchange(APP, "POST", "/v1/completions", body=[b"x"], ends=False)
    assert reply.status == 401
