"""Load tests against a server that the test plays."""

from __future__ import annotations

import asyncio
import json
import math
import resource
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from rich.console import Console

from dynaspec.bench.serving.load import allow_connections, arrival_times, put_load, run_load_test
from dynaspec.bench.serving.report import as_document, as_report, details, remarks, result_name
from dynaspec.bench.serving.server import LoadSettings, LoadWorkload, ServerError, Target, Traffic
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.tokenizer import Tokenizer
from support.fake_server import DONE, MODEL, Call, FakeServer, refused, root, running, token, usage, words
from unit.bench.serving.records import answered, failed
from unit.bench.serving.test_results import page


def gaps(burstiness, seed=0, count=4000):
    times = arrival_times(count, 50.0, burstiness, seed)
    return np.diff([0.0, *times])


def test_all_at_once():
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


def test_at_even_distances():
    assert arrival_times(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma(burstiness):
    """Its coefficient of variation is 1/√shape, and the rate is met exactly."""
    found = gaps(burstiness)
    assert found.sum() == pytest.approx(80.0)
    assert (found >= 0).all()
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_seeds():
    assert arrival_times(5, 1.0, 1.0, 3) == arrival_times(5, 1.0, 1.0, 3)
    assert arrival_times(5, 1.0, 1.0, 3) != arrival_times(5, 1.0, 1.0, 4)


async def test_no_more_than_so_many_at_once():
    at_once = most = 0
    waiting: list[asyncio.Event] = []

    async def send(index):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        event = asyncio.Event()
        waiting.append(event)
        if len(waiting) == 3:  # all places are taken: the first may end
            waiting[0].set()
        elif len(waiting) > 3:
            for earlier in waiting:
                earlier.set()
        await event.wait()
        at_once -= 1
        return failed("x") if index == 1 else answered(float(index), [1.0], 1)

    done = []
    load = await put_load(send, [0.0] * 6, 3, lambda: done.append(1))
    assert most == 3
    assert len(done) == 6
    assert [record.start_s for record in load.records] == [0.0, 0.0, 2.0, 3.0, 4.0, 5.0]
    assert [record.failure is None for record in load.records] == [True, False, True, True, True, True]
    assert load.duration_s > 0
    assert load.client_cpu_s >= 0


async def test_requests_are_sent_in_the_order_of_their_times():
    sent = []

    async def send(index):
        sent.append(index)
        return answered(0.0, [1.0], 1)

    await put_load(send, [0.03, 0.0, 0.015], None, lambda: None)
    assert sent == [1, 2, 0]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [
        {"prompt": f"word{i} " * (3 + 20 * (i == 2)), "category": "even" if i % 2 == 0 else "odd"} for i in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(prompts, **more):
    given = {
        "workload": LoadWorkload(dataset_path=prompts, num_prompts=6, output_len=48, shuffle=False),
        "traffic": Traffic(max_concurrency=2),
        "target": {},
    } | more
    target = Target(**{"root": "http://localhost", **given.pop("target")})
    return LoadSettings(target=target, **given)


async def run(fake, settings, tell=None):
    async with running(fake) as server:
        aimed = replace(settings, target=replace(settings.target, root=root(server)))
        return await run_load_test(aimed, tell or (lambda *_: None))


def shown(finished):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(as_report(finished))
    return capture.get()


async def test_a_load_test(prompts):
    fake = FakeServer(metrics=[page("dynaspec", 1, 10, (1,)), page("dynaspec", 11, 40, (11, 5))])
    told = []
    finished = await run(fake, settings(prompts), lambda *args: told.append(args))
    assert told[0] == ("requests", 0, 6)
    assert told[-1] == ("requests", 6, 6)
    assert len(fake.calls) == 6
    assert fake.most_at_once <= 2
    assert finished.measured.completed == 6
    assert finished.fitted.cut == 1
    cut = next(call.body["prompt"] for call in fake.calls if isinstance(call.body["prompt"], list))
    assert len(cut) == 64 - 48
    assert all("speculation" not in call.body for call in fake.calls), "the server is somebody else's"
    assert all("ignore_eos" not in call.body for call in fake.calls)
    ids = [call.request.headers["X-Request-Id"] for call in fake.calls]
    assert sorted(ids) == [f"bench-{i}" for i in range(6)]

    document = as_document(finished, label="mine", metadata={"machine": "desk", "completed": "never"})
    assert json.loads(json.dumps(document)) == document
    expected = {
        "backend": "openai",
        "label": "mine",
        "model_id": "fake",
        "num_prompts": 6,
        "request_rate": "inf",
        "max_concurrency": 2,
        "completed": 6,
        "failed": 0,
        "total_input_tokens": 42,
        "total_cached_tokens": 12,
        "total_output_tokens": 18,
        "request_goodput": None,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 30,
        "spec_decode_accepted_tokens": 15,
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.5],
        "machine": "desk",
        "metadata": {"machine": "desk", "completed": "never"},
    }
    assert {key: document[key] for key in expected} == expected
    assert document["output_throughput"] == pytest.approx(18 / document["duration"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert document[f"mean_{name}_ms"] is not None
        assert document[f"p50_{name}_ms"] <= document[f"p99_{name}_ms"]
    assert document["settings"]["dataset_path"] == str(prompts)
    assert "versions" in document["provenance"]
    assert result_name(finished, None).startswith("openai-infqps-concurrency2-fake-")

    rows = details(finished)
    assert {len(values) for values in rows.values()} == {6}
    assert rows["generated_texts"][0] == "onetwothree"
    assert rows["output_lens"] == [3] * 6
    text = shown(finished)
    for part in ("6 of 6 successful", "2.50 tokens a draft", "1 of 6 prompts did not fit into 64 tokens", "p99"):
        assert part in text


async def test_our_own_server_says_what_became_of_drafts(prompts):
    told = {"steps": 4, "drafts": 3, "drafted": 10, "accepted": 5}
    fake = FakeServer(models=[MODEL | {"owned_by": "dynaspec"}], answer=words("a", "b", speculation=told))
    finished = await run(fake, settings(prompts))
    assert {json.dumps(call.body["speculation"]) for call in fake.calls} == {'{"metrics": "summary"}'}
    said = as_document(finished)["request_speculation"]
    totals = {"requests": 6, "steps": 24, "drafts": 18, "draft_tokens": 60, "accepted_tokens": 30}
    assert totals.items() <= said.items()
    assert said["acceptance_rate"] == 0.5
    assert said["tokens_per_step"] == pytest.approx(2.25)
    assert {name: drafts["requests"] for name, drafts in said["by_category"].items()} == {"even": 3, "odd": 3}
    assert details(finished)["speculation"][0] == told
    assert "50.0 % of 60 drafted tokens, 2.25 tokens a step" in shown(finished)


async def test_acceptance_can_be_asked_for_or_not(prompts):
    asking = FakeServer()
    await run(asking, settings(prompts, acceptance=True))
    assert all("speculation" in call.body for call in asking.calls)
    silent = FakeServer(models=[MODEL | {"owned_by": "dynaspec"}])
    await run(silent, settings(prompts, acceptance=False))
    assert all("speculation" not in call.body for call in silent.calls)


async def test_fields_and_headers_reach_the_server(prompts):
    fields = {"temperature": 0, "top_k": 3, "ignore_eos": True}
    fake = FakeServer()
    target = {"api_key": "secret", "headers": {"X-Team": "a"}, "request_id_prefix": "r-"}
    finished = await run(fake, settings(prompts, fields=fields, target=target))
    assert all(fields.items() <= call.body.items() for call in fake.calls)
    assert {call.request.headers["Authorization"] for call in fake.calls} == {"Bearer secret"}
    assert {call.request.headers["X-Team"] for call in fake.calls} == {"a"}
    assert "secret" not in json.dumps(as_document(finished) | details(finished))
    assert "secret" not in repr(finished.settings)


async def test_chat(prompts):
    fake = FakeServer(models=[MODEL | {"max_model_len": 4096}])
    chat = settings(prompts, target={"backend": "openai-chat"})
    finished = await run(fake, chat)
    assert finished.measured.completed == 6
    assert fake.calls[0].request.path == "/v1/chat/completions"
    assert fake.calls[0].body["messages"][0]["content"].startswith("word")


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_random_prompts_from_the_servers_tokens(prompts, backend):
    fake = FakeServer(models=[MODEL | {"max_model_len": 4096}])
    random = LoadWorkload(dataset_name="random", num_prompts=3, input_len=20, output_len=5)
    await run(fake, settings(prompts, workload=random, target={"backend": backend}))
    assert all(call.body["ignore_eos"] for call in fake.calls)
    if backend == "openai":
        assert {len(call.body["prompt"]) for call in fake.calls} == {20}
    else:
        assert {len(call.body["messages"][0]["content"].split()) for call in fake.calls} == {20}


async def test_a_server_without_tokenizer_usage_or_metrics(prompts):
    async def answer(call: Call):
        return await call.stream([token("a"), token("b", "length"), DONE])

    finished = await run(FakeServer(tokenizes=False, answer=answer), settings(prompts))
    assert finished.counters is None
    assert finished.measured.output_tokens == 12
    said = remarks(finished)
    assert said[0].startswith("prompts were not checked for length")
    assert said[1].startswith("6 answers came without usage: every chunk counts as one token")


async def test_the_clients_tokenizer_counts_where_the_server_does_not(prompts, tiny):
    async def answer(call: Call):
        return await call.stream([token("the quick"), token(" brown fox", "length"), DONE])

    fake = FakeServer(answer=answer, models=[MODEL | {"max_model_len": 4096}])
    finished = await run(fake, settings(prompts, tokenizer=tiny.target))
    expected = len(Tokenizer(tiny.target).encode("the quick brown fox", special_tokens=False))
    assert finished.measured.output_tokens == 6 * expected
    assert "the tokenizer counted their text" in remarks(finished)[0]
    assert not [path for path, _ in fake.questions if path == "/tokenize"]


async def test_answers_in_one_piece_are_remarked(prompts):
    async def answer(call: Call):
        return web.json_response(token("a b", "length") | {"usage": usage(1, 2)["usage"]})

    finished = await run(FakeServer(answer=answer), settings(prompts))
    assert finished.measured.spreads["tpot"].mean is None
    assert any("6 answers were not streamed" in remark for remark in remarks(finished))


async def test_repeated_prompts_are_remarked(prompts):
    workload = LoadWorkload(dataset_path=prompts, num_prompts=8, output_len=8)
    finished = await run(FakeServer(), settings(prompts, workload=workload))
    assert any(remark.startswith("2 of 8 prompts were sent before") for remark in remarks(finished))


async def test_some_requests_fail(prompts):
    async def answer(call: Call):
        fails = "word1" in call.body["prompt"]
        return await (refused(503, "the queue is full", "overloaded_error") if fails else words("a", "b"))(call)

    finished = await run(FakeServer(answer=answer), settings(prompts))
    document = as_document(finished)
    assert (document["completed"], document["failed"]) == (5, 1)
    assert document["failures"] == [{"kind": "HTTP 503 overloaded_error", "count": 1, "example": "the queue is full"}]
    rows = details(finished)
    assert rows["errors"][1] == "HTTP 503 overloaded_error: the queue is full"
    assert (rows["ttfts"][1], rows["output_lens"][1], rows["itls"][1]) == (0.0, 0, [])
    assert "the queue is full" in shown(finished)


async def test_all_requests_fail(prompts):
    finished = await run(FakeServer(answer=refused(400, "no [such] thing")), settings(prompts))
    document = as_document(finished)
    assert (document["completed"], document["failed"], document["mean_ttft_ms"]) == (0, 6, None)
    text = shown(finished)
    assert "0 of 6 successful" in text
    assert "no [such] thing" in text, "messages are no markup"


async def test_warm_up_and_first_request(prompts):
    fake = FakeServer()
    told = []
    target = {"ready_check_timeout_s": 5.0}
    warm = settings(prompts, traffic=Traffic(num_warmups=2, request_rate=1000.0, burstiness=math.inf), target=target)
    finished = await run(fake, warm, lambda *args: told.append(args))
    ids = [call.request.headers["X-Request-Id"] for call in fake.calls]
    assert ids[:3] == ["bench-try-0", "bench-warm-up-0", "bench-warm-up-0"]
    assert len(ids) == 9
    assert ("warm-up", 2, 2) in told
    assert finished.measured.completed == 6, "what comes beforehand does not count"


async def test_the_first_request_must_succeed_if_it_is_tried(prompts):
    with pytest.raises(ServerError, match="first request failed: HTTP 400 invalid_request_error: too long"):
        await run(FakeServer(answer=refused(400, "too long")), settings(prompts, target={"ready_check_timeout_s": 5.0}))


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        ([MODEL], "other", "the model 'other' is not served at http://.*; expected 'fake'"),
        (None, None, "names no model at /v1/models"),
        ([], None, "names no model at /v1/models"),
    ],
)
async def test_models(prompts, models, wanted, message):
    with pytest.raises(ServerError, match=message):
        await run(FakeServer(models=models), settings(prompts, target={"model": wanted}))


async def test_a_server_without_a_list_of_models(prompts):
    fake = FakeServer(models=None)
    finished = await run(fake, settings(prompts, target={"model": "any"}))
    assert finished.measured.completed == 6
    assert {call.body["model"] for call in fake.calls} == {"any"}


async def test_a_server_that_wants_a_key(prompts):
    with pytest.raises(ServerError, match="/v1/models refuses with status 401; expected a key, see --api-key"):
        await run(FakeServer(key="right"), settings(prompts, target={"api_key": "wrong"}))
    finished = await run(FakeServer(key="right"), settings(prompts, target={"api_key": "right"}))
    assert finished.measured.completed == 6


def test_more_connections_than_the_system_allows(monkeypatch):
    changed = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: changed.append(limits))
    allow_connections(100)
    assert changed == []
    allow_connections(500)
    assert changed == [(564, 1000)]
    with pytest.raises(ConfigError, match=r"2000 requests at once .* expected --max-concurrency of at most 936"):
        allow_connections(2000)


@pytest.mark.parametrize(
    ("timeout", "message"), [(0.0, "no server answers at http://"), (0.2, "not ready after 0.2 s")]
)
async def test_nobody_there(prompts, timeout, message):
    server = running(FakeServer())
    await server.start_server()
    address = root(server)
    await server.close()
    target = {"root": address, "ready_check_timeout_s": timeout}
    with pytest.raises(ServerError, match=message):
        await run_load_test(settings(prompts, target=target), lambda *_: None)
