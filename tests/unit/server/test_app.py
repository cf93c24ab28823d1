"""The application as a whole: routes, errors as OpenAI's objects, keys, origins, limits. What endpoints answer is
tested with them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import httpx
import pytest

from dynaspec import AsyncLLM, __version__
from dynaspec.contract.errors import DynaspecError, RequestError
from dynaspec.server.app import create_app
from dynaspec.server.config import ServerConfig
from dynaspec.server.run import make_state
from support.checkpoints import Pair

COMPLETION = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 3}
KEY = {"Authorization": "Bearer sk-right"}


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny.target, max_num_seqs=2)
    yield llm
    llm.close()


@asynccontextmanager
async def client_of(llm: AsyncLLM, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in the same process."""
    config = ServerConfig.build({}, **({"served_model_name": "tiny"} | options))
    app = create_app(make_state(llm, config))
    transport = httpx.ASGITransport(app, root_path="", raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.state = app.state.dynaspec
        yield client


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(llm) as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return body["error"]


async def test_health(client):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).status_code == 200
    assert (await client.get("/version")).json() == {"version": __version__}
    assert (await client.get("/ping")).status_code == (await client.post("/ping")).status_code == 200


async def test_while_it_drains_it_is_alive_but_not_ready(client):
    client.state.admission.drain()
    assert (await client.get("/health")).status_code == 200
    for response in (await client.get("/ready"), await client.post("/v1/completions", json=COMPLETION)):
        assert response.status_code == 503
        assert error_of(response)["code"] == "shutting_down"
        assert int(response.headers["retry-after"]) > 0


async def test_a_closed_engine_is_neither(tiny):
    llm = AsyncLLM(tiny.target)
    async with client_of(llm) as client:
        llm.close()
        for response in (
            await client.get("/health"),
            await client.get("/ready"),
            await client.get("/ping"),
            await client.post("/v1/completions", json=COMPLETION),
        ):
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_stopped"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *[("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")],
        *[("POST", "/detokenize"), ("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics"), ("GET", "/version")],
        *[("GET", "/dashboard"), ("GET", "/openapi.json")],
    ],
)
async def test_every_endpoint_is_there(client, method, path):
    assert (await client.request(method, path)).status_code in (200, 400)


async def test_a_completion_reaches_the_model(client):
    response = await client.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "mine"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["usage"]["completion_tokens"] == 3


async def test_an_unknown_path_is_an_error_object(client):
    response = await client.get("/v2/models")
    assert response.status_code == 404
    assert error_of(response)["type"] == "not_found_error"
    assert "GET /v2/models" in error_of(response)["message"]


async def test_a_slash_at_the_end_is_not_followed(client):
    assert (await client.get("/v1/models/")).status_code == 404


@pytest.mark.parametrize("path", ["/%0A", "/health%0A", "/v1/models%0A", "/dashboard%0A", "/docs"])
async def test_a_path_that_only_looks_like_an_endpoint_s_is_none(client, path):
    response = await client.get(path)
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


async def test_a_wrong_method_is_an_error_object(client):
    response = await client.delete("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_of(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize("body", [b"{", b'{"model": "tiny"}', b'{"prompt": 1.5}', b"\xff", b"[" * 100_000, b"[1]"])
async def test_a_body_that_does_not_fit_is_a_bad_request(client, body):
    response = await client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (RequestError("too long"), 400, "invalid_request_error"),
        (DynaspecError("it has stopped"), 503, "server_error"),
        (ZeroDivisionError("secret"), 500, "server_error"),
    ],
)
async def test_what_an_endpoint_raises_is_an_error_object(client, caplog, raised, status, kind):
    with mock.patch.object(
        type(client.state.admission), "draining", new_callable=mock.PropertyMock, create=True, side_effect=raised
    ):
        response = await client.get("/ready")
    assert response.status_code == status
    assert error_of(response)["type"] == kind
    assert "secret" not in response.text + caplog.text
    assert ("ZeroDivisionError" in caplog.text) == (status == 500)


async def test_a_body_that_is_too_large(llm):
    async with client_of(llm, max_request_bytes=1024) as client:
        response = await client.post("/v1/completions", json=COMPLETION | {"prompt": "x" * 1024})
        assert response.status_code == 413
        assert error_of(response)["code"] == "request_too_large"
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_full_queue_says_when_to_come_again(llm):
    async with client_of(llm, max_queued_requests=0) as client:
        async with client.state.admission.slot(2):
            response = await client.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 503
        assert error_of(response)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) > 0
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_more_than_the_server_ever_takes_is_refused(llm):
    async with client_of(llm, max_queued_requests=1) as client:
        response = await client.post("/v1/completions", json=COMPLETION | {"prompt": ["a", "b"], "n": 2})
        assert response.status_code == 400
        assert "4" in error_of(response)["message"]


async def test_keys(llm):
    async with client_of(llm, api_key=["sk-right"]) as client:
        response = await client.get("/v1/models")
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert (await client.get("/v1/models", headers=KEY)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/dashboard")).status_code == 200
        assert (await client.get("/dashboard/feed")).status_code == 401


async def test_pages_of_other_origins_are_let_in_only_if_named(llm):
    async with client_of(llm, allowed_origins=["https://good.example"], api_key=["sk-right"]) as client:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        good = await client.options("/v1/completions", headers={"Origin": "https://good.example", **asked})
        assert good.status_code == 200
        assert good.headers["access-control-allow-origin"] == "https://good.example"
        bad = await client.options("/v1/completions", headers={"Origin": "https://bad.example", **asked})
        assert "access-control-allow-origin" not in bad.headers
        refused = await client.get("/v1/models", headers={"Origin": "https://good.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://good.example"


async def test_without_origins_there_are_none(client):
    response = await client.get("/v1/models", headers={"Origin": "https://any.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_docs_and_dashboard_can_be_left_out(llm):
    async with client_of(llm, disable_docs=True, enable_dashboard=False) as client:
        for path in ("/openapi.json", "/dashboard", "/dashboard/feed", "/"):
            assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models"])
async def test_below_a_proxy_s_path(llm, path):
    async with client_of(llm, root_path="/llm", api_key=["sk-right"]) as client:
        assert (await client.get(path, headers=KEY)).status_code == 200
        assert (await client.get(path)).status_code == 401


async def test_the_log_has_counts_but_no_prompt(client, caplog):
    caplog.set_level(logging.DEBUG)
    await client.post("/v1/completions", json=COMPLETION, headers=KEY)
    await client.post("/v1/completions", json=COMPLETION | {"max_tokens": -1})
    shown = "".join(json.dumps(vars(record), default=str) for record in caplog.records if record.name != "httpx")
    assert COMPLETION["prompt"] not in shown
    assert "sk-right" not in shown
    assert '"completion_tokens": 3' in shown


async def test_prompts_are_logged_if_wanted(llm, caplog):
    caplog.set_level(logging.INFO, "dynaspec")
    async with client_of(llm, log_requests=True) as client:
        await client.post("/v1/completions", json=COMPLETION, headers=KEY)
    shown = "".join(json.dumps(vars(record), default=str) for record in caplog.records)
    assert "the quick brown fox" in shown
    assert "sk-right" not in shown


async def test_places_are_left_when_many_requests_have_ended(client):
    bodies = [COMPLETION, COMPLETION | {"stream": True}, COMPLETION | {"prompt": []}, COMPLETION | {"n": 2}]
    await asyncio.gather(*[client.post("/v1/completions", json=body) for body in bodies * 4])
    assert client.state.admission.active == 0
