"""Servers that a sweep starts, its loads and its figures."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from rich.console import Console

from dynaspec.bench.plots import plot_sweep
from dynaspec.bench.serving import sweep as sweep_module
from dynaspec.bench.serving.server import LoadSettings, LoadWorkload, Reported, ServerError, Target
from dynaspec.bench.serving.sweep import (
    HOST,
    LoadPoint,
    SweepPlan,
    as_document,
    as_table,
    as_text,
    free_port,
    launched,
    make_points,
    run_sweep,
    serve_command,
    summarise,
)
from dynaspec.contract.errors import ConfigError
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.policies.short_names import parse_policy
from support.fake_server import FakeServer, root, running, words
from unit.bench.serving.test_results import page

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
    monkeypatch.setattr(sweep_module, "_STOP_S", 0.3 if manner == "stubborn" else 60.0)
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


@pytest.mark.parametrize("name", ["auto:8", "confidence:0.4:20", "schedule:1-4=5/5-32=2", "elastic:5/10:0.3"])
def test_a_policy_survives_the_command_line(name):
    spec = parse_policy(name, "folder/draft")
    *_, option, given, last = serve_command("folder/target", spec, 8123, ["--dtype=float32"])
    assert option == "--speculative-config"
    assert SpeculativeConfig.parse(given) == spec.config
    assert last == "--dtype=float32"


def test_plain_decoding_has_no_speculation():
    line = serve_command("folder/target", parse_policy("plain", None), 8123, [])
    assert line[1:] == ["-m", "dynaspec", "serve", "folder/target", "--host", HOST, "--port", "8123"]
    assert json.dumps(line)


@dataclass
class Fleet:
    """Servers by name, and what happened to them."""

    servers: dict[str, FakeServer]
    events: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    most: int = 0

    def sides(self):
        return {name: lambda name=name: self._start(name) for name in self.servers}

    @asynccontextmanager
    async def _start(self, name):
        async with running(self.servers[name]) as server:
            self.events.append(f"+{name}")
            self.running.add(name)
            self.most = max(self.most, len(self.running))
            try:
                yield Target(root=root(server))
            finally:
                self.events.append(f"-{name}")
                self.running.remove(name)


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"word{i}"}) + "\n" for i in range(500)))
    return LoadSettings(
        target=Target(root="http://nowhere"),
        workload=LoadWorkload(dataset_path=path, num_prompts=3, output_len=4),
        reported=Reported(goals_ms={"e2el": 60_000}),
    )


def fleet(*names):
    return Fleet({name: FakeServer() for name in names})


async def sweep(settings, fleet, plan, told=None):
    seen = []
    cells = await run_sweep(settings, fleet.sides(), plan, lambda *args: told is None or told.append(args), seen.append)
    assert seen == cells
    assert not fleet.running
    return cells


def order(cells):
    return [(cell.round, cell.point.label, cell.side) for cell in cells]


def measured_prompts(server, cells, side):
    """Prompts of a side's requests without those of its warm-up, load test by load test."""
    prompts = [call.body["prompt"] for call in server.calls]
    counts = [len(cell.finished.fitted.requests) for cell in cells if cell.side == side]
    rest = prompts[len(prompts) - sum(counts) :]
    return [sorted(rest[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]


async def test_servers_take_turns(settings):
    servers, told = fleet("a", "b"), []
    cells = await sweep(settings, servers, SweepPlan(make_points([1, 4], []), rounds=2, prompts_per_client=2), told)
    assert order(cells) == [
        *((0, "1", "a"), (0, "1", "b"), (0, "4", "a"), (0, "4", "b")),
        *((1, "1", "b"), (1, "1", "a"), (1, "4", "b"), (1, "4", "a")),
    ]
    assert servers.events == ["+a", "+b", "-b", "-a"], "every server is started once"
    assert [len(cell.finished.fitted.requests) for cell in cells[:4]] == [3, 3, 8, 8]
    mine, theirs = (measured_prompts(servers.servers[name], cells, name) for name in "ab")
    assert mine == theirs, "both answer the same"
    assert mine[0] != mine[2], "another round asks other questions"
    assert told[-1] == ("load 4", 100, 100)


async def test_one_server_at_a_time(settings):
    servers = fleet("a", "b")
    plan = SweepPlan(make_points([1, 2], []), rounds=2, one_at_a_time=True)
    cells = await sweep(settings, servers, plan)
    assert order(cells) == [
        *((0, "1", "a"), (0, "2", "a"), (0, "1", "b"), (0, "2", "b")),
        *((1, "1", "b"), (1, "2", "b"), (1, "1", "a"), (1, "2", "a")),
    ]
    assert servers.most == 1
    assert servers.events == ["+a", "-a", "+b", "-b", "+b", "-b", "+a", "-a"]


async def test_servers_are_stopped_when_one_cannot_be_measured(settings):
    servers = fleet("a", "b")
    servers.servers["b"].models = None
    with pytest.raises(Exception, match="names no model"):
        await sweep(settings, servers, SweepPlan(make_points([1], [])))
    assert servers.events == ["+a", "+b", "-b", "-a"]


async def test_result(settings, tmp_path):
    servers = fleet("plain", "auto")
    drafting = [page("dynaspec", 10 * i, 40 * i, (10 * i, 5 * i)) for i in range(8)]
    servers.servers["auto"] = FakeServer(answer=words("a b", "c", tokens=6), metrics=drafting)
    cells = await sweep(settings, servers, SweepPlan(make_points([1, 2], []), rounds=1))
    rows = summarise(cells)
    assert [f"{row.side} {row.point.label}" for row in rows] == ["plain 1", "auto 1", "plain 2", "auto 2"]
    assert rows[0].over_first == 1.0
    assert rows[1].over_first == pytest.approx(rows[1].output_tokens_per_s / rows[0].output_tokens_per_s)
    assert rows[0].acceptance_length is None
    assert rows[1].acceptance_rate == pytest.approx(15 / 40)
    assert all(row.goodput > 0 and row.failed == 0 and row.tail_e2el_ms >= row.e2el_ms for row in rows)

    document = as_document(cells, {"rounds": 1})
    assert json.loads(json.dumps(document)) == document
    assert document["summary"][3]["point"] == {"max_concurrency": 2, "request_rate": "inf"}
    assert [cell["side"] for cell in document["cells"]] == ["plain", "auto", "plain", "auto"]
    assert document["cells"][1]["total_output_tokens"] == 4 * 6

    text = as_text(cells)
    assert text.startswith("| load | side | tokens/s | / first |")
    assert "failed" not in text.splitlines()[0], "nothing has failed"
    console = Console(width=120)
    with console.capture() as capture:
        console.print(as_table(cells))
    assert "…" not in capture.get()

    picture = tmp_path / "sweep.png"
    plot_sweep(rows, picture, "a title")
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_a_picture_without_drafts_at_rates(settings, tmp_path):
    cells = await sweep(settings, fleet("server"), SweepPlan(make_points([], [200.0, 400.0])))
    assert [cell.point.label for cell in cells] == ["200/s", "400/s"]
    plot_sweep(summarise(cells), tmp_path / "p.png", "rates")
    assert (tmp_path / "p.png").stat().st_size > 0


def test_points():
    assert make_points([1, 4], []) == (LoadPoint(1), LoadPoint(4))
    assert make_points([], [2.0]) == (LoadPoint(None, 2.0),)
    assert [point.label for point in make_points([1, 4], [2.0, 0.5])] == ["2/s 1", "2/s 4", "0.5/s 1", "0.5/s 4"]
    assert LoadPoint(None, math.inf).label == "all"


@pytest.mark.parametrize("wrong", [{"points": ()}, {"rounds": 0}, {"prompts_per_client": 0}])
def test_empty_plans(wrong):
    with pytest.raises(ConfigError, match="expected at least one of each"):
        replace(SweepPlan((LoadPoint(1),)), **wrong)
