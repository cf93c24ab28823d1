from __future__ import annotations

import json
import os
import sys

import pytest

from dynaspec.bench.policies import parse_policy
from dynaspec.bench.serving import launch
from dynaspec.bench.serving.launch import HOST, free_port, launched, serve_command
from dynaspec.bench.serving.server import ServerError
from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig

SERVES = """
import http.server, json, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), "keys", os.environ.get("DYNASPEC_API_KEY"), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SLEEPS = "import time; time.sleep(600)"
FAILS = "print('all well'); print('error: no such model'); print(); raise SystemExit(2)"


def command(script, *arguments):
    return [sys.executable, "-c", script, *map(str, arguments)]


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("manner", ["obedient", "stubborn"])
async def test_a_server_lives_as_long_as_its_context(tmp_path, monkeypatch, manner):
    monkeypatch.setattr(launch, "_STOP_S", 0.3 if manner == "stubborn" else 60.0)
    monkeypatch.setenv("DYNASPEC_API_KEY", "secret")
    port, log = free_port(), tmp_path / "log"
    async with launched("x", command(SERVES, port, manner), f"http://{HOST}:{port}", log, 60.0):
        _, pid, _, keys = log.read_text().split()[:4]
        assert lives(int(pid))
        assert keys == "None"
    assert not lives(int(pid))


async def test_a_server_is_stopped_after_an_error(tmp_path):
    port, log = free_port(), tmp_path / "log"

    async def fail():
        async with launched("x", command(SERVES, port), f"http://{HOST}:{port}", log, 60.0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert not lives(int(log.read_text().split()[1]))


async def test_a_server_that_ends_at_once(tmp_path):
    with pytest.raises(ServerError, match="the server of auto ended with code 2: error: no such model"):
        async with launched("auto", command(FAILS), f"http://{HOST}:{free_port()}", tmp_path / "log", 60.0):
            pass


async def test_a_server_that_is_never_ready(tmp_path):
    with pytest.raises(ServerError, match="the server of auto was not ready after"):
        async with launched("auto", command(SLEEPS), f"http://{HOST}:{free_port()}", tmp_path / "log", 0.1):
            pass


async def test_no_place_for_the_log(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        async with launched("auto", command(SLEEPS), "http://x", tmp_path / "no" / "log", 0.1):
            pass


@pytest.mark.parametrize("name", ["auto:8", "confidence:0.4:20", "schedule:1-4=5;5-32=2", "elastic:5/10:0.3"])
def test_a_policy_survives_the_command_line(name):
    spec = parse_policy(name, "folder/draft")
    *_, option, given, last = serve_command("folder/target", spec, 8123, ["--dtype=float32"])
    assert option == "--speculative-config"
    assert SpeculativeConfig.parse(given) == spec.config
    assert last == "--dtype=float32"


def test_plain_decoding_has_no_speculation():
    line = serve_command("folder/target", parse_policy("plain", None), 8123, [])
    assert line[1:] == ["-m", "dynaspec.cli.main", "serve", "folder/target", "--host", HOST, "--port", "8123"]
    assert json.dumps(line)
