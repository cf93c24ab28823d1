"""``dynaspec serve --backend vllm`` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynaspec.observe.decision_log import PlanCall, read_calls
from hosts.vllm.engines import MODELS

COMMAND = (sys.executable, "-m", "dynaspec", "serve", "--backend", "vllm")
KEY = "sesame"
START_S = 600
PROMPT = "The history of the city"


def environment() -> dict[str, str]:
    """Without what makes vLLM run in one process, as other tests have it."""
    return {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"} | {
        "VLLM_LOGGING_LEVEL": "INFO"
    }


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    decisions: Path

    def ask(self, path: str, body: Any = None, *, key: str = KEY) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read(), "utf-8")

    def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"model": "b", "prompt": PROMPT, "max_tokens": 30, "temperature": 0} | fields
        answer: dict[str, Any] = json.loads(self.ask("/v1/completions", body))
        return answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "serve.yaml"
    config.write_text(
        f"model: {MODELS / 'target'}\nhost: 127.0.0.1\nport: {port}\ndtype: float32\nenforce-eager: true\n"
        f"max-model-len: 256\nmax-num-seqs: 8\naccess-log: false\nspeculative-config: {{model: {MODELS / 'draft'}}}\n"
    )
    log, decisions = folder / "log", folder / "decisions.jsonl"
    arguments = ("--config", str(config), "--api-key", KEY, "--decision-log", str(decisions))
    names = ("--served-model-name", "a", "b")
    with log.open("wb") as file:
        process = subprocess.Popen([*COMMAND, *arguments, *names], env=environment(), stdout=file, stderr=file)
    one = Server(process, port, log, decisions)
    try:
        _wait(one)
        yield one
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            server.ask("/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail("it did not start:\n" + server.log.read_text("utf-8", "replace")[-3000:])


def test_what_was_handed_over_is_said_without_keys(server: Server) -> None:
    text = server.log.read_text("utf-8", "replace")
    assert "hands over to vLLM:" in text
    assert f"vllm serve {MODELS / 'target'} --host 127.0.0.1" in text
    assert "--scheduler-cls dynaspec.hosts.vllm.Scheduler" in text
    assert KEY not in text


def test_completions_do_not_change_with_drafts(server: Server) -> None:
    drafted = server.complete()
    plain = server.complete(vllm_xargs={"dynaspec": '{"num_speculative_tokens": 0}'})
    assert drafted["model"] == "a"  # the first of its names
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"] != ""


def test_keys_are_asked_for(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        server.ask("/v1/models", key="guess")


def test_dynaspec_s_metrics_stand_beside_vllm_s(server: Server) -> None:
    server.complete()
    deadline = time.monotonic() + 30
    while "dynaspec:" not in (text := server.ask("/metrics")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "\nvllm:spec_decode_num_drafts_total" in text
    assert "\ndynaspec:" in text


def test_its_decisions_are_logged_while_it_runs(server: Server) -> None:
    """What is buffered is written four times a second, and when nothing runs."""
    server.complete()
    deadline = time.monotonic() + 30
    while not (drafted := _drafted(server.decisions)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert drafted


def _drafted(log: Path) -> bool:
    """Whether a log, which may be being written, holds a plan with drafts."""
    if not log.exists() or not log.stat().st_size:
        return False
    return any(isinstance(call, PlanCall) and any(call.plan.depth) for call in read_calls(log))


def test_it_ends_on_sigterm(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(300) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nosuch",), "unrecognized arguments: --nosuch"),
        (("--port", "x"), "argument --port: invalid int value: 'x'"),
        (("--enable-auto-tool-choice",), "--enable-auto-tool-choice requires --tool-call-parser"),
        (("--speculative-config.method", "ngram"), "expected it as one JSON object"),
        (("--request-timeout-s", "3"), "--request-timeout-s 3 is not available"),
    ],
)
def test_wrong_flags_are_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    ran = subprocess.run(
        [*COMMAND, str(MODELS / "target"), *arguments], env=environment(), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert "Traceback" not in ran.stderr
