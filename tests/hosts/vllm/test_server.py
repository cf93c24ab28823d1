"""vLLM's OpenAI server with dynaspec's scheduler: it answers, and its metrics show what is decided."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts.vllm.engines import DRAFTERS, SCHEDULER, engine_options

START_S = 600


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        text: str = answer.read().decode()
        return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its address, and its decision log."""
    folder = tmp_path_factory.mktemp("server")
    log, port = folder / "decisions.jsonl", free_port()
    options = engine_options()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", options["model"], "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "8", "--scheduler-cls", SCHEDULER]
    command += ["--speculative-config", json.dumps(DRAFTERS["draft_model"])]
    command += ["--additional-config", json.dumps({"dynaspec": {"policy": "auto", "decision_log": str(log)}})]
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    output = (folder / "output.txt").open("w")
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
    try:
        wait_for(process, f"http://127.0.0.1:{port}/health", folder / "output.txt")
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        process.wait(timeout=120)
        output.close()


def wait_for(process: subprocess.Popen[bytes], url: str, output: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server has ended:\n{output.read_text()[-4000:]}")
        try:
            ask(url)
            return
        except OSError:
            time.sleep(1.0)
    pytest.fail(f"the server has not started:\n{output.read_text()[-4000:]}")


def metric(text: str, name: str) -> float | None:
    found = re.search(rf"^dynaspec:{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


def test_completions_and_metrics(server: tuple[str, Path]) -> None:
    address, log = server
    body = {"model": "demo", "prompt": "def area(radius):", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    plain = json.loads(
        ask(f"{address}/v1/completions", {**body, "vllm_xargs": {"dynaspec": '{"num_speculative_tokens": 0}'}})
    )
    first = json.loads(ask(f"{address}/v1/completions", body))
    assert first["usage"]["completion_tokens"] == 60
    assert first["choices"][0]["text"] == plain["choices"][0]["text"]
    labels = '{engine="0",model_name="demo"}'
    text = ""
    for _ in range(60):  # the last report comes with the step after the last token
        text = ask(f"{address}/metrics")
        if (metric(text, f"decode_tokens_total{labels}") or 0) >= 118:
            break
        time.sleep(0.5)
    assert metric(text, f"decode_tokens_total{labels}") == 118  # all but the first token of both
    assert metric(text, f"controller_enabled{labels}") == 1
    assert metric(text, 'engine_info{engine="0",model_name="demo",policy="auto"}') == 1
    accepted = metric(text, f"spec_decode_num_accepted_tokens_total{labels}")
    assert accepted is not None
    assert 0 < accepted <= (metric(text, f"spec_decode_num_draft_tokens_total{labels}") or 0)
    states = [metric(text, f'guard_state{{engine="0",model_name="demo",state="{s}"}}') for s in ("plain", "speculate")]
    assert None not in states
    for name in ("draft_length_chosen", "goodput_predicted", "goodput_measured"):
        assert metric(text, f"{name}{labels}") is not None
    assert "vllm:generation_tokens_total" in text
    assert log.exists()
