from __future__ import annotations

import json

import pytest
from rich.console import Console

from dynaspec.bench.serving.compare import as_table, compare, load_results, warnings
from dynaspec.contract.errors import ConfigError

OURS = {
    "kind": "serve",
    "backend": "openai",
    "max_concurrency": 4,
    "num_prompts": 10,
    "label": "mine",
    "completed": 10,
    "failed": 0,
    "request_throughput": 2.0,
    "request_goodput": None,
    "output_throughput": 100.0,
    "mean_ttft_ms": 50.0,
    "median_ttft_ms": 40.0,
    "p50_ttft_ms": 40.0,
    "p99.9_ttft_ms": 80.0,
    "std_ttft_ms": 3.0,
    "spec_decode_acceptance_length": 3.0,
    "settings": {"output_len": 128, "seed": 0, "fields": {"temperature": 0}},
    "server": {"max_model_len": 2048, "url": "http://a", "root": "x"},
    "provenance": {"date": "today", "machine": {"cpu": "A", "cpu_count": 2, "system": "x"}},
}
VLLM = {
    "backend": "vllm",
    "max_concurrency": None,
    "num_prompts": 10,
    "completed": 9,
    "failed": 1,
    "request_throughput": 1.0,
    "output_throughput": 100.5,
    "mean_ttft_ms": 60.0,
    "p99.9_ttft_ms": 40.0,
}


@pytest.fixture
def write(tmp_path):
    def write(name, document):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


def lines(comparison):
    return {line.name: line for line in comparison.lines}


def test_ratios(write):
    comparison = compare(load_results([write("a.json", OURS), write("b.json", VLLM)]))
    assert comparison.names == ("a", "b")
    found = lines(comparison)
    assert {"std_ttft_ms", "p50_ttft_ms", "request_goodput"}.isdisjoint(found)
    verdicts = {name: (line.ratio(1), line.verdict(1, 0.01)) for name, line in found.items()}
    assert verdicts == {
        "completed": (0.9, 0),
        "failed": (None, -1),
        "request_throughput": (0.5, -1),
        "output_throughput": (1.005, 0),
        "spec_decode_acceptance_length": (None, 0),
        "mean_ttft_ms": (1.2, -1),
        "median_ttft_ms": (None, 0),
        "p99.9_ttft_ms": (0.5, 1),
    }
    console = Console(width=120)
    with console.capture() as capture:
        console.print(as_table(comparison))
    assert "request_throughput 2.000 1.000 0.500 worse" in " ".join(capture.get().split())


def test_differing_settings(write):
    other = OURS | {
        "settings": {"output_len": None, "seed": 0, "fields": {}},
        "server": {"max_model_len": 4096, "url": "http://b"},
        "provenance": {"date": "tomorrow", "machine": {"cpu": "B", "cpu_count": 2}},
    }
    paths = [write("a.json", OURS), write("b.json", other), write("c.json", VLLM)]
    assert warnings(compare(load_results(paths))) == [
        'backend differs: "openai", "openai", "vllm"',
        "max_concurrency differs: 4, 4, null",
        "output_len differs: 128, null, not said",
        'fields differs: {"temperature": 0}, {}, not said',
        "server.max_model_len differs: 2048, 4096, not said",
        'machine.cpu differs: "A", "B", not said',
        "c does not say all of its settings",
    ]


def test_files_of_the_same_name(write):
    paths = [write("x/r.json", OURS), write("y/r.json", OURS)]
    comparison = compare(load_results(paths))
    assert comparison.names == tuple(map(str, paths))
    assert warnings(comparison) == []


def test_policies_of_an_offline_result(write):
    def policy(name, speed):
        counts = {"draft_acceptance_rate": 0.5, "target_passes": 3}
        return {"policy": name, "tokens_per_second": speed, "different_outputs": 0, "identical": True, "counts": counts}

    document = {"options": {"policies": ["x"], "seed": 1}, "results": [policy("plain", 10.0), policy("auto", 15.0)]}
    comparison = compare(load_results([write("o.json", document)]))
    assert comparison.names == ("o plain", "o auto")
    found = lines(comparison)
    assert (found["tokens_per_second"].ratio(1), found["tokens_per_second"].verdict(1, 0.01)) == (1.5, 1)
    assert found["target_passes"].values == (3, 3)
    assert comparison.differing == {}


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([OURS], "1 result was given"),
        ([OURS, "{"], "is not JSON"),
        ([OURS, {"cells": []}], "is no result of bench serve"),
        ([OURS, [1]], "is no result of bench serve"),
        ([OURS, {"options": {}, "results": [{"policy": "plain", "speedup": 1.0}]}], "no figure in common"),
    ],
)
def test_what_cannot_be_compared(write, documents, message):
    paths = [write(f"{i}.json", document) for i, document in enumerate(documents)]
    with pytest.raises(ConfigError, match=message):
        compare(load_results(paths))


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_results([tmp_path / "none.json"])
