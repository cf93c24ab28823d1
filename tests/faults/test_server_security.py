"""What a server must not do whoever asks: tell keys or prompts to its log, or open what a request names."""

from __future__ import annotations

import builtins
import hmac
import io
import json
import logging
import os
import pickle
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import httpx
import pytest

from dynaspec import AsyncLLM
from dynaspec.engine.config import EngineConfig
from dynaspec.server import middleware
from dynaspec.server.config import ServerConfig
from dynaspec.server.logs import JsonFormatter, TextFormatter
from support.checkpoints import Pair
from support.http_server import serving
from unit.server.serving import Client, make_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY, WRONG_KEY, PROMPT = "sk-the-right-key", "sk-a-wrong-key", "quetzalcoatl"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 3},
        max_num_seqs=8,
    )
    yield engine
    engine.close()


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[Client]:
    one = Client(make_app(llm))
    yield one
    await one.close()


# --- keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("says", "key", "status"), [(True, WRONG_KEY, 200), (False, KEY, 401)])
async def test_the_comparison_in_constant_time_decides(llm: AsyncLLM, says: bool, key: str, status: int) -> None:
    """Nothing else that takes more or less long is asked, before or after it."""
    app = make_app(llm, api_key=KEY)
    with mock.patch.object(middleware.hmac, "compare_digest", return_value=says) as compare:
        client = Client(app)
        response = await client.send("/tokenize", b'{"prompt": "x"}', Authorization=f"Bearer {key}")
        await client.close()
    assert (response.status_code, compare.call_count) == (status, 1)
    assert middleware.hmac is hmac


# --- the log ----------------------------------------------------------------------------------------------------


@contextmanager
def captured(level: int) -> Iterator[io.StringIO]:
    """Everything that any logger says at a level, in both forms, and all that its records hold."""
    said = io.StringIO()

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.split(".")[0] in ("httpcore", "httpx"):  # what the test asks with
                return
            for formatter in (TextFormatter(), JsonFormatter()):
                print(formatter.format(record), file=said)
            print(vars(record), file=said)

    root, keeper = logging.getLogger(), Keeper()
    before = {logger: logger.level for logger in (root, *_loggers())}
    root.addHandler(keeper)
    for logger in before:
        logger.setLevel(level)
    try:
        yield said
    finally:
        root.removeHandler(keeper)
        for logger, was in before.items():
            logger.setLevel(was)


def _loggers() -> list[logging.Logger]:
    """Those of the server's process; what the test asks with has a log of its own."""
    names = [
        name for name in logging.root.manager.loggerDict if name.split(".")[0] in ("dynaspec", "uvicorn", "asyncio")
    ]
    return [logging.getLogger(name) for name in names]


REQUESTS: dict[str, tuple[str, Any]] = {
    "a completion": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2}),
    "a stream": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "stream": True}),
    "a chat": (CHAT, {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}),
    "tokens": ("/tokenize", {"prompt": PROMPT}),
    "too long": (COMPLETIONS, {"prompt": PROMPT * 100}),
    "no Unicode": (COMPLETIONS, {"prompt": PROMPT + "\ud800"}),
    "a wrong value": (COMPLETIONS, {"prompt": "x", "temperature": PROMPT}),
    "an unknown field": (COMPLETIONS, {"prompt": "x", PROMPT: 1}),
    "an unknown model": (COMPLETIONS, {"prompt": "x", "model": PROMPT}),
    "a wrong form": (COMPLETIONS, {"prompt": "x", "guided_regex": f"({PROMPT}"}),
    "a wrong grammar": (COMPLETIONS, {"prompt": "x", "guided_grammar": f"start: {PROMPT}"}),
    "no JSON": (COMPLETIONS, f'{{"prompt": "{PROMPT}"'.encode()),
    "no template variable": (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": PROMPT}}),
}


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR])
async def test_no_log_shows_a_key_or_a_prompt(llm: AsyncLLM, level: int) -> None:
    async with serving(llm, api_key=KEY, uvicorn_log_level="trace") as server:
        with captured(level) as said:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                for path, body in REQUESTS.values():
                    content = body if isinstance(body, bytes) else json.dumps(body).encode()
                    for key in (KEY, WRONG_KEY):
                        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                        await http.post(path, content=content, headers=headers)
    shown = said.getvalue()
    for secret in (KEY, WRONG_KEY, PROMPT):
        assert secret not in shown
    if level <= logging.INFO:
        assert shown.count('"status": 200') == 5
        assert shown.count('"status": 401') == len(REQUESTS)


@pytest.mark.parametrize("where", ["encode", "render_chat"])
async def test_a_bug_shows_neither(llm: AsyncLLM, where: str) -> None:
    path, body = REQUESTS["a chat"]
    with captured(logging.DEBUG) as said:
        broken = mock.patch.object(type(llm.tokenizer), where, side_effect=ZeroDivisionError(PROMPT))
        client = Client(make_app(llm, api_key=KEY))
        with broken:
            response = await client.send(path, json.dumps(body).encode(), Authorization=f"Bearer {KEY}")
        await client.close()
    assert response.status_code == 500
    assert PROMPT not in response.text
    assert "ZeroDivisionError" in said.getvalue()
    for secret in (KEY, PROMPT):
        assert secret not in said.getvalue()


# --- what a request names ---------------------------------------------------------------------------------------


@contextmanager
def nothing_opened() -> Iterator[None]:
    """Neither files nor connections nor pickles, from whatever thread."""
    refused = AssertionError("something was opened")
    with (
        mock.patch.object(builtins, "open", side_effect=refused),
        mock.patch.object(os, "open", side_effect=refused),
        mock.patch.object(socket.socket, "connect", side_effect=refused),
        mock.patch.object(pickle, "load", side_effect=refused),
        mock.patch.object(pickle, "loads", side_effect=refused),
    ):
        yield


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


NAMED: dict[str, tuple[str, dict[str, Any], int]] = {
    "a model's path": (COMPLETIONS, {"prompt": "x", "model": "/etc/passwd"}, 404),
    "a model above": (COMPLETIONS, {"prompt": "x", "model": "../../etc"}, 404),
    "a model's URL": (CHAT, {"messages": HI, "model": "file:///etc/passwd"}, 404),
    "a repository": (CHAT, {"messages": HI, "model": "someone/something"}, 404),
    "a model to tokenize with": ("/tokenize", {"prompt": "x", "model": "/etc/passwd"}, 404),
    "a LoRA": (COMPLETIONS, {"prompt": "x", "lora_path": "/tmp/lora"}, 400),
    "a LoRA request": (COMPLETIONS, {"prompt": "x", "lora_request": {"lora_path": "/tmp/lora"}}, 400),
    "an image in a file": (CHAT, part(type="image_url", image_url={"url": "file:///etc/passwd"}), 400),
    "an image elsewhere": (CHAT, part(type="image_url", image_url={"url": "http://127.0.0.1:9/x.png"}), 400),
    "a file": (CHAT, part(type="file", file={"file_id": "/etc/passwd"}), 400),
    "a schema in a file": (COMPLETIONS, {"prompt": "x", "guided_json": {"$ref": "file:///etc/passwd"}}, 400),
    "a schema elsewhere": (COMPLETIONS, {"prompt": "x", "guided_json": {"$ref": "http://127.0.0.1:9/x.json"}}, 400),
    "a grammar's import": (COMPLETIONS, {"prompt": "x", "guided_grammar": "%import .passwd.X\nstart: X"}, 400),
    "a template": (CHAT, {"messages": HI, "chat_template": "{% include '/etc/passwd' %}"}, 400),
    "code": (COMPLETIONS, {"prompt": "x", "logits_processors": [{"qualname": "os.system"}]}, 400),
    "embeddings": (COMPLETIONS, {"prompt": "x", "prompt_embeds": "gASVAAAAAAAAAAA="}, 400),
    "trust": (COMPLETIONS, {"prompt": "x", "trust_remote_code": True, "max_tokens": 1}, 200),
}


@pytest.mark.parametrize("kind", NAMED)
async def test_what_a_request_names_is_not_opened(client: Client, kind: str) -> None:
    path, body, status = NAMED[kind]
    await client.ask(COMPLETIONS, prompt="x", max_tokens=1, guided_regex="a")  # all that is loaded late is loaded
    with nothing_opened():
        response = await client.post(path, **body)
    assert response.status_code == status, response.text
    if status == 200:
        assert response.headers["X-Ignored-Fields"] == "trust_remote_code"
    else:
        assert response.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
    await client.ask(COMPLETIONS, prompt="x", max_tokens=1)


@pytest.mark.parametrize(
    "template", ["{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__ }}", "{{ open('/etc/passwd') }}"]
)
async def test_even_the_servers_own_template_opens_nothing(llm: AsyncLLM, template: str) -> None:
    client = Client(make_app(llm, chat_template=template))
    error = await client.refused(CHAT, messages=HI)
    assert "chat template refused" in error["message"]
    await client.close()


def test_a_server_is_closed_and_trusts_nobody_by_default() -> None:
    assert EngineConfig(model="x").trust_remote_code is False
    config = ServerConfig()
    assert (config.host, config.allowed_origins, config.log_requests) == ("127.0.0.1", (), False)
