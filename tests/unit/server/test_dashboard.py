"""The page's routes: what is sent to whom, and when the stream ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib import resources
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette

from dynaspec.contract.errors import DynaspecError
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.stats import EngineSnapshot, LiveRequest
from dynaspec.server.app import create_app
from dynaspec.server.config import ServerConfig
from dynaspec.server.middleware import Admission
from dynaspec.server.state import ServerState
from support.snapshots import snapshot

KEY = "a-key-of-the-test"
STATIC = resources.files("dynaspec.server.dashboard") / "static"


class Engine:
    """Says what it is told to; counts how often it is asked."""

    healthy = True

    def __init__(self) -> None:
        self.now = snapshot()
        self.looks = 0
        self.stopped = False

    async def snapshot(self) -> EngineSnapshot:
        if self.stopped:
            raise DynaspecError("the engine has stopped: out of luck")
        self.looks += 1
        return self.now


@pytest.fixture
def engine() -> Engine:
    return Engine()


def make_state(engine: Engine, **options: Any) -> ServerState:
    return ServerState(
        llm=cast(Any, engine),
        config=ServerConfig.build(stats_interval_s=0.1, access_log=False, **options),
        admission=Admission(4, 4),
        served_names=("tiny", "alias"),
        started_at=1_700_000_000,
    )


def client_of(state: ServerState) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(state)), base_url="http://test")


async def watch(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    """The feed's events as they come; leaving hangs up, as a closed browser does. The app must then be done."""
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    left = asyncio.Event()
    requests = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> dict[str, Any]:
        request = next(requests, None)
        if request is None:
            await left.wait()
        return request or {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/dashboard/feed",
        "raw_path": b"/dashboard/feed",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [],
        "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "server": ("test", 80),
        "client": ("test", 1),
    }
    answering = asyncio.create_task(app(scope, receive, sent.put))
    try:
        assert (await sent.get())["status"] == 200
        while (message := await sent.get()).get("more_body"):
            line = message["body"].decode()
            assert line.startswith("data: ")
            assert line.endswith("\n\n")
            yield json.loads(line.removeprefix("data: "))
    finally:
        left.set()
        await answering


async def first_event(state: ServerState) -> dict[str, Any]:
    async with aclosing(watch(create_app(state))) as events:
        return await anext(events)


@pytest.mark.parametrize("path", ["/", "/dashboard"])
async def test_the_page_brings_no_script_of_its_own_and_forbids_all_others(engine, path):
    async with client_of(make_state(engine)) as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert not re.search(r'(?:src|href)="(?:/|http)', answer.text)  # so that it works below any path
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", answer.text)
    assert engine.looks == 0


async def test_every_file_that_the_page_names_is_there(engine):
    async with client_of(make_state(engine)) as client:
        page = (await client.get("/")).text
        names = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page)
        found = {name: await client.get(f"/{name}") for name in names}
    assert len(names) >= 7
    assert {name: answer.status_code for name, answer in found.items()} == dict.fromkeys(names, 200)
    assert all(answer.headers["cache-control"] == "no-cache" for answer in found.values())
    assert "javascript" in found["dashboard/static/js/main.js"].headers["content-type"]


def test_modules_import_only_what_is_shipped():
    scripts = STATIC / "js"
    for script in scripts.iterdir():
        for name in re.findall(r'from "\./([^"]+)"', script.read_text("utf-8")):
            assert (scripts / name).is_file(), f"{script.name} imports {name}"


def test_text_enters_the_page_as_text_alone():
    unsafe = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
    assert [file.name for file in (STATIC / "js").iterdir() if unsafe.search(file.read_text("utf-8"))] == []


def test_the_chart_library_comes_with_its_licence():
    folder = STATIC / "vendor" / "uplot"
    assert "MIT License" in (folder / "LICENSE").read_text("utf-8")
    assert "1.6.32" in (folder / "uPlot.iife.min.js").read_text("utf-8")[:200]


@pytest.mark.parametrize("path", ["../view.py", "..%2fview.py", "js/../../view.py", "js", "no.js"])
async def test_nothing_else_is_sent(engine, path):
    async with client_of(make_state(engine)) as client:
        answer = await client.get(f"/dashboard/static/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_with_a_key_the_page_is_open_but_what_it_shows_is_not(engine):
    state = make_state(engine, api_key=KEY)
    state.admission.drain()  # so that the stream ends
    async with client_of(state) as client:
        open_paths = [await client.get(path) for path in ("/", "/dashboard/static/js/main.js")]
        refused = [await client.get("/dashboard/feed"), await client.get("/dashboard/feed", headers=bearer("no"))]
        allowed = await client.get("/dashboard/feed", headers=bearer(KEY))
    assert [answer.status_code for answer in open_paths] == [200, 200]
    assert [answer.status_code for answer in refused] == [401, 401]
    assert allowed.status_code == 200
    assert engine.looks == 1


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_the_first_event_says_how_things_are(engine):
    engine.now = snapshot(
        SpecCounts(preemptions=2, proposer_faults=1),
        generated=50,
        running=1,
        waiting=1,
        kv_blocks_used=25,
        prefix_cache_queries=40,
        prefix_cache_hits=10,
        proposers={"draft_model": True, "ngram": False},
        estimates={"proposers": {"draft_model": {"acceptance": [0.8, 0.7], "cost": {"pass_s": 0.001}}}},
        requests=(LiveRequest("a", "running", 5, 7, 4, 3, 0), LiveRequest("b", "waiting", 9, 0, 0, 0, 1)),
    )
    found = await first_event(make_state(engine))
    now = found["now"]
    assert set(map(tuple, found["points"].values())) == {()}
    assert (now["model"], now["policy"], now["state"], now["stopped"]) == ("tiny", "auto", "serving", None)
    assert (now["running"], now["waiting"], now["prefix_hit_rate"]) == (1, 1, 0.25)
    assert (now["generated"], now["preemptions"], now["faults"]) == (50, 2, 1)
    assert now["drafters"][0] == {
        "name": "draft_model",
        "on": True,
        "acceptance": [0.8, 0.7],
        "cost": {"pass_s": 0.001},
    }
    assert now["drafters"][1]["on"] is False
    assert [request["id"] for request in now["requests"]] == ["a", "b"]
    assert now["requests"][0]["accepted"] == 3


async def test_points_come_as_columns_and_positions_as_shares_of_drafts(engine):
    async with aclosing(watch(create_app(make_state(engine)))) as events:
        await anext(events)
        engine.now = snapshot(
            SpecCounts(steps=1, drafts=4, draft_tokens=6, accepted=4, drafted_per_pos=(4, 2), accepted_per_pos=(3, 1)),
            generated=12,
        )
        found = await anext(events)
    points, now = found["points"], found["now"]
    assert {len(column) for column in points.values()} == {1}
    assert points["emitted_per_s"][0] > points["accepted_per_s"][0] > 0
    assert points["draft_length"] == [1.5]
    assert now["minute"]["positions"] == [{"drafted": 1.0, "accepted": 0.75}, {"drafted": 0.5, "accepted": 0.25}]
    assert now["state"] == "serving"  # nobody is left, but there was somebody a moment ago


async def test_a_position_that_was_never_accepted_is_shown_as_such(engine):
    async with aclosing(watch(create_app(make_state(engine)))) as events:
        await anext(events)
        engine.now = snapshot(SpecCounts(drafts=2, drafted_per_pos=(2, 1), accepted_per_pos=(1,)))
        now = (await anext(events))["now"]
    assert now["minute"]["positions"][1] == {"drafted": 0.5, "accepted": 0.0}


async def test_a_long_queue_is_cut_and_its_length_said(engine):
    engine.now = snapshot(requests=tuple(LiveRequest(str(i), "waiting", 1, 0, 0, 0, 0) for i in range(80)))
    now = (await first_event(make_state(engine)))["now"]
    assert (len(now["requests"]), now["requests_total"]) == (50, 80)


async def test_numbers_that_cannot_be_are_not_sent(engine):
    wrong = {"acceptance": [0.5, float("nan"), -0.2, 1.5], "cost": {"pass_s": -1.82, "row_s": float("nan")}}
    engine.now = snapshot(running=1, estimates={"proposers": {"d": wrong}}, proposers={"d": True, "e": True})
    drafters = (await first_event(make_state(engine)))["now"]["drafters"]
    assert drafters[0] == {"name": "d", "on": True, "acceptance": [0.5, None, None, None], "cost": {}}
    assert drafters[1] == {"name": "e", "on": True, "acceptance": [], "cost": {}}


async def test_who_hangs_up_is_no_longer_looked_for(engine):
    async with aclosing(watch(create_app(make_state(engine)))) as events:
        await anext(events)
        await anext(events)
    seen = engine.looks
    await asyncio.sleep(0.25)
    assert engine.looks == seen


async def test_watchers_do_not_hold_up_a_drained_server(engine):
    state = make_state(engine)
    async with state.admission.slot(), aclosing(watch(create_app(state))) as events:
        await anext(events)
        state.admission.drain()
        states = [(await anext(events))["now"]["state"] for _ in range(2)]
    assert states == ["draining", "draining"]
    async with aclosing(watch(create_app(state))) as events:
        assert [event["now"]["state"] async for event in events] == ["draining"]


async def test_a_stopped_engine_is_told_of(engine):
    engine.stopped = True
    now = (await first_event(make_state(engine)))["now"]
    assert (now["state"], now["stopped"]) == ("stopped", "the engine has stopped: out of luck")
    assert now["model"] == "tiny"


async def test_a_server_may_do_without_the_page(engine):
    async with client_of(make_state(engine, enable_dashboard=False)) as client:
        answers = [await client.get(path) for path in ("/", "/dashboard", "/dashboard/feed")]
    assert [answer.status_code for answer in answers] == [404, 404, 404]
