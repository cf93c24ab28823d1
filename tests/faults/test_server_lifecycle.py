"""The life and death of a server: signals, an engine that dies, clients that leave, and the process as its users start
it."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from dynaspec import AsyncLLM
from dynaspec.engine.config import EngineConfig
from dynaspec.server.config import ServerConfig
from dynaspec.server.run import ENGINE_DIED, run
from dynaspec.server.state import ServerState
from support.certificates import make_certificate
from support.checkpoints import Pair
from support.faulty import Injected
from support.http_server import PATIENCE_S, Serving, serving
from support.serve_process import serve

LONG = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
STREAM = LONG | {"stream": True}


class Brake:
    """Holds an engine's steps up, and can make them fail."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.broken = False
        self._free = threading.Event()
        self._steps: int | None = None
        self._step = llm._engine.step
        llm._engine.step = self._checked

    def hold_after(self, steps: int) -> None:
        """Lets so many steps more run: a prompt's, and some that decode."""
        self._free.clear()
        self._steps = steps

    def release(self, *, broken: bool = False) -> None:
        """Lets the others run, or fail."""
        self.broken = broken
        self._steps = None
        self._free.set()

    def _checked(self) -> Any:
        if self._steps is not None:
            if self._steps == 0:
                self._free.wait(PATIENCE_S)
            else:
                self._steps -= 1
        if self.broken:
            raise Injected("a step failed")
        return self._step()


@pytest.fixture
def llm(tiny: Pair) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny.target, max_num_seqs=4)
    yield llm
    llm.close()


@pytest.fixture
def brake(llm: AsyncLLM) -> Iterator[Brake]:
    brake = Brake(llm)
    yield brake
    brake.release()


@asynccontextmanager
async def stream(server: Serving, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
    """The answer's lines, after the first, from which on it is under way."""
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        lines = (line async for line in response.aiter_lines() if line)
        await anext(lines)
        yield lines


async def rest(lines: AsyncIterator[str]) -> list[str]:
    return [line.removeprefix("data: ") async for line in lines]


def finish_reason(line: str) -> str | None:
    return json.loads(line)["choices"][0]["finish_reason"]


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_running_requests_finish_and_nobody_else_is_let_in(llm, brake):
    async with serving(llm) as server, AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(httpx.AsyncClient(base_url=server.url)) for _ in range(3)]
        for client in idle:
            assert (await client.get("/ready")).status_code == 200
        brake.hold_after(3)
        lines = await stack.enter_async_context(stream(server, STREAM))
        server.signal()
        await until(lambda: server.state.admission.draining)

        refused = await idle[0].post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) > 0
        assert (await idle[1].get("/ready")).status_code == 503
        assert (await idle[2].get("/health")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await idle[0].get("/health")  # needs a new connection

        brake.release()
        *_, last, done = await rest(lines)
        assert (finish_reason(last), done) == ("length", "[DONE]")
        await server.ended()
        assert not server.server.failed


async def test_what_does_not_finish_in_time_is_aborted_with_a_last_output(llm, brake):
    brake.hold_after(3)
    async with serving(llm, drain_timeout_s=0) as server, stream(server, STREAM) as lines:
        whole = asyncio.create_task(post(server, LONG))
        await until(lambda: server.state.admission.active == 2)
        server.signal()
        await until(lambda: server.state.admission.draining)
        brake.release()
        *_, last, done = await rest(lines)
        assert (finish_reason(last), done) == ("abort", "[DONE]")
        answer = await whole
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
        await server.ended()


async def post(server: Serving, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        return await client.post("/v1/completions", json=body)


async def test_a_second_signal_cuts_connections(llm, brake):
    brake.hold_after(3)
    async with serving(llm, drain_timeout_s=3600) as server, stream(server, STREAM) as lines:
        server.signal()
        await until(lambda: server.state.admission.draining)
        server.signal()
        with pytest.raises(httpx.RemoteProtocolError):
            await rest(lines)
        await server.ended()


async def test_when_the_engine_dies_everyone_is_told_and_the_server_ends(llm, brake):
    brake.hold_after(3)
    async with serving(llm) as server, stream(server, STREAM) as lines:
        whole = asyncio.create_task(post(server, LONG))
        await until(lambda: server.state.admission.active == 2)
        brake.release(broken=True)
        *_, error, done = await rest(lines)
        assert (json.loads(error)["error"]["code"], done) == ("engine_stopped", "[DONE]")
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
        await server.ended()
        assert server.server.failed


async def test_a_server_may_outlive_its_engine(llm, brake):
    brake.release(broken=True)
    async with serving(llm, shutdown_on_engine_death=False) as server:
        assert (await post(server, LONG)).status_code == 503
        async with httpx.AsyncClient(base_url=server.url) as client:
            for path in ("/health", "/ready"):
                response = await client.get(path)
                assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stopped")
        assert (await post(server, LONG)).status_code == 503
        assert not server.task.done()


async def test_clients_that_leave_leave_their_places(llm, brake):
    async with serving(llm) as server:
        brake.hold_after(3)
        async with stream(server, STREAM):
            whole = asyncio.create_task(post(server, LONG))
            await until(lambda: server.state.admission.active == 2)
            whole.cancel()
            await until(lambda: server.state.admission.active == 1)
        await until(lambda: server.state.admission.active == 0)
        brake.release()
        assert (await post(server, LONG | {"max_tokens": 2})).status_code == 200
        assert (await llm.snapshot()).running == 0


def test_the_process_ends_with_an_error_when_its_engine_dies(tiny):
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE_S))

    def announce(state: ServerState, url: str) -> None:
        Brake(state.llm).release(broken=True)
        thread.append(threading.Thread(target=ask, args=(url,)))
        thread[0].start()

    thread: list[threading.Thread] = []
    config = ServerConfig(port=0, served_model_name=("tiny",))
    assert run(EngineConfig(model=tiny.target), config, announce) == ENGINE_DIED
    thread[0].join(PATIENCE_S)
    assert answers[0].status_code == 503


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_a_server_from_a_file(tiny, tmp_path, certificate):
    """HTTPS, keys, names; then a SIGTERM while a stream runs, which ends as if nothing had happened."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"""\
model: {tiny.target}
speculative-config:
  model: {tiny.drafter}
  num_speculative_tokens: 4
served-model-name: [tiny, other]
port: 1
ssl-certfile: {certificate[0]}
ssl_keyfile: {certificate[1]}
max-num-seqs: 8
disable-log-requests: true
""",
        "utf-8",
    )
    context = ssl.create_default_context(cafile=certificate[0])
    with (
        serve("--config", str(file), "--port", "0", DYNASPEC_API_KEY="sk-first,sk-second") as server,
        httpx.Client(base_url=server.url, verify=context, timeout=PATIENCE_S) as client,
    ):
        assert server.url.startswith("https://127.0.0.1:")
        assert client.get("/ready").json() == {"status": "ok"}
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer sk-second"
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
        with client.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.signal()
            *_, last, done = [line.removeprefix("data: ") for line in lines]
        assert (finish_reason(last), done) == ("length", "[DONE]")
        assert server.exit_code() == 0
        assert "sk-" not in json.dumps(server.log)
        told = [entry["message"] for entry in server.log]
        assert any(message.startswith("SIGTERM: shutting down; running requests: ") for message in told)
        assert told[-1] == "the server has stopped"
        (served,) = [entry for entry in server.log if entry.get("path") == "/v1/completions"]
        assert (served["status"], served["completion_tokens"]) == (200, LONG["max_tokens"])


def test_two_signals_end_the_process_at_once(tiny):
    many = STREAM | {"n": 100, "temperature": 1}
    with (
        serve(tiny.target, "--port", "0", "--max-num-seqs", "1", "--drain-timeout-s", "3600") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=many | {"model": tiny.target}) as response,
    ):
        lines = response.iter_lines()
        assert response.status_code == 200, list(lines)
        next(lines)
        server.signal()
        while not any("shutting down" in entry["message"] for entry in server.log):
            next(lines)
        server.signal()
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            list(lines)
        assert server.exit_code() == 0
