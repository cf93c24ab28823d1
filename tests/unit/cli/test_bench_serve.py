"""``bench serve``, ``sweep`` and ``compare`` as a shell calls them, against a server in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest

from dynaspec.cli.options import spread
from support.fake_server import FakeServer, refused, root, running


@contextmanager
def served(fake):
    """The fake server's address, while an event loop of another thread runs it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = running(fake)

    def wait(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        wait(server.start_server())
        yield root(server)
    finally:
        wait(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"word{i}"}) + "\n" for i in range(8)))
    return path


def test_serve(dynaspec, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    fake = FakeServer()
    with served(fake) as address:
        result = dynaspec(
            *("bench", "serve", "--backend", "vllm", "--base-url", f"{address}/v1", "--dataset-path", prompts),
            *("--num-prompts", 5, "--max-concurrency", 2, "--output-len", 9, "--temperature", 0, "--ignore-eos"),
            *("--goodput", "ttft:60000", "e2el:60000", "--extra-body", '{"min_tokens": 3}', "--header", "X-Team=a"),
            *("--metric-percentiles", "50,99.9", "--percentile-metrics", "ttft,e2el", "--label", "trial"),
            *(
                "--metadata",
                "machine=desk",
                "note=a=b",
                "--save-result",
                "--save-detailed",
                "--result-dir",
                tmp_path / "r",
            ),
        )
    assert result.code == 0, result.err
    assert "5 of 5 successful" in result.out
    assert "5 with ttft ≤ 60000 ms, e2el ≤ 60000 ms" in result.out
    body = fake.calls[0].body
    assert {"temperature": 0, "ignore_eos": True, "min_tokens": 3, "max_tokens": 9}.items() <= body.items()
    assert fake.calls[0].request.headers["X-Team"] == "a"
    assert fake.calls[0].request.headers["Authorization"] == "Bearer secret"
    (path,) = (tmp_path / "r").glob("trial-infqps-concurrency2-fake-*.json")
    text = path.read_text("utf-8")
    document = json.loads(text)
    assert "secret" not in text
    assert (document["completed"], document["machine"], document["note"]) == (5, "desk", "a=b")
    assert "p99.9_e2el_ms" in document
    assert "mean_tpot_ms" not in document
    assert document["settings"]["fields"] == {"temperature": 0.0, "ignore_eos": True, "min_tokens": 3}
    assert len(document["ttfts"]) == 5
    assert f"written to {path}" in result.err


def test_all_failed(dynaspec, prompts):
    with served(FakeServer(answer=refused(400, "the prompt is too long"))) as address:
        result = dynaspec(
            *("bench", "serve", "--base-url", address, "--dataset-path", prompts, "--num-prompts", 2, "--output-len", 4)
        )
    assert result.code == 1
    assert "0 of 2 successful" in result.out
    assert "the prompt is too long" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "1"), "no server answers at http://127.0.0.1:1 "),
        (("--backend", "triton"), "the backend is 'triton'"),
        (("--endpoint", "/v1/embeddings"), "expected a path that ends with completions"),
        (("--goodput", "ttft=200"), "--goodput has 'ttft=200'; expected KEY:VALUE"),
        (("--goodput", "ttft:fast"), "--goodput has 'fast'; expected a number"),
        (("--goodput", "itl:3"), "expected ttft, tpot, e2el"),
        (("--metric-percentiles", "p99"), "--metric-percentiles has 'p99'"),
        (("--percentile-metrics", "speed"), "have 'speed'"),
        (("--extra-body", "{"), "which is not JSON"),
        (("--extra-body", "[1]"), "expected a JSON object"),
        (("--header", "X"), "--header has 'X'; expected KEY=VALUE"),
        (("--request-rate", "0"), "the request rate is 0"),
        (("--save-result", "--result-dir", "/dev/null/x"), "cannot be created"),
    ],
)
def test_bad_input(dynaspec, arguments, message):
    result = dynaspec("bench", "serve", *arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert message in result.err


def test_what_a_server_does_not_have(dynaspec):
    with served(FakeServer()) as address:
        result = dynaspec("bench", "serve", "--base-url", address, "--model", "other")
        assert (result.code, "expected 'fake'" in result.err) == (2, True)
        result = dynaspec("bench", "serve", "--base-url", address, "--dataset-name", "spec_bench")
        assert (result.code, "'spec_bench' has no path" in result.err) == (2, True)
        result = dynaspec("bench", "serve", "--base-url", address, "--dataset-path", "none.jsonl")
        assert (result.code, "cannot be read" in result.err) == (2, True)


def test_compare(dynaspec, prompts, tmp_path):
    with served(FakeServer()) as address:
        for name, concurrency in (("a", 1), ("b", 4)):
            result = dynaspec(
                *("bench", "serve", "--base-url", address, "--dataset-path", prompts, "--num-prompts", 4),
                *("--max-concurrency", concurrency, "--output-len", 4, "--disable-tqdm"),
                *("--save-result", "--result-dir", tmp_path, "--result-filename", f"{name}.json"),
            )
            assert result.code == 0, result.err
            assert result.err == f"written to {tmp_path / name}.json\n"
    result = dynaspec("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert result.code == 0
    assert "output_throughput" in result.out
    assert result.err == "note: max_concurrency differs: 1, 4\n"
    result = dynaspec("bench", "compare", tmp_path / "a.json")
    assert (result.code, "expected at least two" in result.err) == (2, True)


def test_sweep_of_a_running_server(dynaspec, prompts, tmp_path):
    with served(FakeServer()) as address:
        result = dynaspec(
            *("bench", "sweep", "--base-url", address, "--dataset-path", prompts, "--output-len", 4),
            *("--max-concurrency", "1,2", "--num-prompts", 3, "--rounds", 2, "--output-dir", tmp_path / "s"),
        )
    assert result.code == 0, result.err
    document = json.loads((tmp_path / "s" / "sweep.json").read_text("utf-8"))
    assert [(cell["round"], cell["max_concurrency"]) for cell in document["cells"]] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert len(document["summary"]) == 2
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"sweep.json", "sweep.md", "sweep.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model was given; expected --model"),
        (("--base-url", "http://x", "--policies", "auto"), "--base-url was given together with --policies"),
        (("--base-url", "http://x", "--one-at-a-time"), "--base-url was given together with --one-at-a-time"),
        (("--model", "m", "--policies", "magic"), "the policy 'magic' is not known"),
        (("--model", "m", "--policies", "plain,plain"), "expected policies, each once"),
        (("--model", "m", "--policies", "constant:4"), "needs a draft model"),
        (("--model", "m", "--policies", "plain", "--serve-args", "--api-key x"), "--serve-args has --api-key"),
        (("--model", "m", "--policies", "plain", "--max-concurrency", "many"), "--max-concurrency has 'many'"),
        (("--model", "m", "--policies", "plain", "--max-concurrency", "1.5"), "--max-concurrency has 1.5"),
    ],
)
def test_bad_sweeps(dynaspec, tmp_path, arguments, message):
    result = dynaspec("bench", "sweep", *arguments, "--output-dir", tmp_path)
    assert result.code == 2
    assert message in result.err


def test_options_with_several_values():
    given = ["--goodput", "a:1", "b:2", "--port", "1", "--metadata", "x=1", "y=2", "z=3", "--save-result"]
    assert spread(given) == [
        *("--goodput", "a:1", "--goodput", "b:2", "--port", "1"),
        *("--metadata", "x=1", "--metadata", "y=2", "--metadata", "z=3", "--save-result"),
    ]
    assert spread(["file", "--header", "a=b"]) == ["file", "--header", "a=b"]


def test_sweep_starts_and_stops_a_server(dynaspec, pair, prompts, tmp_path):
    """A real one: the whole way from ``dynaspec serve`` to acceptance in the result."""
    result = dynaspec(
        *("bench", "sweep", "--model", pair.target, "--draft-model", pair.drafter, "--policies", "constant:2"),
        *("--dataset-path", prompts, "--output-len", 12, "--max-concurrency", 2, "--num-prompts", 4),
        *("--temperature", 0, "--output-dir", tmp_path, "--disable-tqdm"),
    )
    assert result.code == 0, result.err
    (cell,) = json.loads((tmp_path / "sweep.json").read_text("utf-8"))["cells"]
    assert (cell["completed"], cell["failed"]) == (8, 0)
    assert cell["spec_decode_num_drafts"] > 0
    said = cell["request_speculation"]
    assert said["requests"] == 8
    assert said["accepted_tokens"] == cell["spec_decode_accepted_tokens"]
    assert cell["median_tpot_ms"] > 0
    assert (tmp_path / "server-constant-2.log").stat().st_size > 0
