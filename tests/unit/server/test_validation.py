from __future__ import annotations

from typing import Any

import pytest

from dynaspec import AsyncLLM
from unit.server.serving import Client, error_of, make_app

PATH = "/v1/completions"

BODIES: list[tuple[bytes, str | None, str]] = [
    (b"", None, "no body"),
    (b"null", None, "the body is null; expected a JSON object"),
    (b"{", None, "not JSON at character 1"),
    (b'{"prompt": "a",}', None, "not JSON"),
    (b"[1]", None, "a list of 1"),
    (b'"text"', None, "'text'"),
    (b"\xff\xfe{", None, "not UTF-8"),
    (b'{"prompt": "\xc3"}', None, "not UTF-8 at byte 12"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", None, "too many digits"),
    (b'{"prompt": "a", "seed": ' + b"9" * 200 + b"}", "seed", "a very large number"),
    (b'{"prompt": "a", "\\ud800": 1}', None, "not valid Unicode"),
    (b'{"prompt": "a", "temperature": Infinity}', "temperature", "finite"),
    (b'{"prompt": "a", "temperature": "1"}', "temperature", "is '1'; expected a number"),
    (b'{"prompt": "a", "stream": "yes"}', "stream", "true or false"),
    (b'{"prompt": "a", "n": 1.5}', "n", "1.5; expected an integer"),
    (b'{"prompt": "a", "stop": {"a": 1}}', "stop", "an object; expected text or list"),
    (b'{"prompt": "a", "stop": [1]}', "stop.0", "1; expected text"),
    (b'{"prompt": "a", "response_format": {"type": "json_schema"}}', "response_format.json_schema", "lacks the field"),
    (
        b'{"prompt": "a", "response_format": {"type": "x"}}',
        "response_format.type",
        "is 'x'; expected an object whose type",
    ),
    (b'{"prompt": "a", "response_format": {}}', "response_format", "an object; expected an object whose type is"),
    (b'{"prompt": "a", "speculation": 3}', "speculation", "3; expected an object"),
    (b'{"prompt": "a", "logit_bias": {"1": "' + b"b" * 100 + b'"}}', "logit_bias.1", "bbb…;"),
    (
        b'{"prompt": "a", "structured_outputs": {"json": 5}}',
        "structured_outputs.json",
        "is 5; expected a JSON schema, as an object or as text",
    ),
    (b'{"prompt": "a", "guided_json": [1]}', "guided_json", "a list of 1; expected a JSON schema, as an object or as"),
    (b'{"prompt": "a", "guided_choice": []}', "guided_choice", "a list of 0; expected at least 1"),
]


@pytest.mark.parametrize(("body", "param", "words"), BODIES, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_with_a_body_is_told(client: Client, body: bytes, param: str | None, words: str) -> None:
    response = await client.send(PATH, body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert len(error["message"]) < 300


async def test_a_body_must_be_declared_as_json(client: Client) -> None:
    response = await client.send(PATH, b'{"prompt": "a"}', **{"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


async def test_json_may_be_declared_more_closely(client: Client) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    response = await client.send(PATH, '{"prompt": "é", "max_tokens": 1}'.encode(), **headers)
    assert response.status_code == 200


async def test_no_error_is_fastapis_own(client: Client) -> None:
    document = (await client.get("/openapi.json")).json()
    operations = [
        operation for path in document["paths"].values() for operation in path.values() if "requestBody" in operation
    ]
    assert operations
    for operation in operations:
        response = operation["responses"]["400"]["content"]["application/json"]["schema"]
        assert response == {"$ref": "#/components/schemas/ErrorReply"}


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "frobnicate": 1}, "frobnicate"),
    ("/v1/completions", {"prompt": "a", "speculation": {"depth": 2}}, "speculation.depth"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 5},
     "thinking_token_budget"),
    ("/tokenize", {"prompt": "x", "frob": 1}, "frob"),
    ("/detokenize", {"tokens": [1], "frob": 1}, "frob"),
]  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("path", "body", "field"), UNKNOWN)
async def test_unknown_fields_are_ignored_with_one_warning(
    llm: AsyncLLM, path: str, body: dict[str, Any], field: str, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(make_app(llm, log_requests=named))
    name = field.replace(".0.", "[].")
    for _ in range(2):
        response = await client.post(path, **({"max_tokens": 1} if path.startswith("/v1") else {}), **body)
        assert (response.status_code, response.headers["X-Ignored-Fields"]) == (200, name)
    await client.close()
    [told] = [one.getMessage() for one in caplog.records if "unknown and ignored" in one.getMessage()]
    assert told.startswith(f"the field {name} of" if named else "fields of")
    assert (name in told) is named


async def test_known_fields_are_not_told(client: Client) -> None:
    assert "X-Ignored-Fields" not in (await client.post(PATH, prompt="a", max_tokens=1, user="me")).headers


@pytest.mark.parametrize(("path", "body", "field"), UNKNOWN)
async def test_a_strict_server_refuses_them(llm: AsyncLLM, path: str, body: dict[str, Any], field: str) -> None:
    client = Client(make_app(llm, strict=True))
    error = await client.refused(path, **body)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert f"unknown field {field!r}" in error["message"]
    await client.close()


async def test_a_name_that_is_none_is_shown_nowhere(client: Client) -> None:
    response = await client.post(PATH, prompt="a", max_tokens=1, **{"my secret\r\n": 1, "x" * 100: 2, "é": 3})
    assert response.headers["X-Ignored-Fields"] == "?"


async def test_a_header_names_a_few(client: Client) -> None:
    response = await client.post(PATH, prompt="a", max_tokens=1, **{f"x{i}": i for i in range(1000)})
    assert response.headers["X-Ignored-Fields"] == ", ".join(f"x{i}" for i in range(10))


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "x", "content": "a"}, "messages.0.role", "messages.0.role is 'x'; expected a message whose role is"),
        ({"content": "a"}, "messages.0", "messages.0 is an object; expected a message whose role is"),
    ],
    ids=str,
)
async def test_a_message_of_no_known_role(client: Client, message: dict[str, str], param: str, words: str) -> None:
    response = await client.post("/v1/chat/completions", messages=[message])
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]
