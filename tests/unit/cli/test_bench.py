from __future__ import annotations

import json

import pytest


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"category": "long", "prompt": "the quick brown fox " * 60}, {"category": "short", "turns": ["1 2 3"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_offline(dynaspec, pair, dataset, tmp_path):
    out = tmp_path / "results" / "out.json"
    result = dynaspec(
        *("bench", "offline", "--model", pair.target, "--draft-model", pair.drafter, "--dataset", dataset),
        *("--policies", "constant:3,ngram:constant:3", "--max-tokens", 12, "--rounds", 2, "--batch-size", 2),
        *("--temperature", 0.7, "--output-json", out),
    )
    assert result.code == 0, result.err
    assert "note: 1 of 2 prompts did not fit" in result.err
    document = json.loads(out.read_text("utf-8"))
    assert set(document) == {"schema", "provenance", "options", "prompts_cut", "results"}
    assert document["prompts_cut"] == 1
    assert document["options"]["engine"]["max_num_seqs"] == 2
    assert {"date", "versions", "machine", "threads", "git", "environment"} <= set(document["provenance"])
    assert [r["policy"] for r in document["results"]] == ["plain", "constant:3", "ngram:constant:3"]
    plain, constant, _ = document["results"]
    assert plain["speedup"] == 1.0
    assert plain["counts"]["drafts"] == 0
    assert constant["counts"]["draft_tokens"] > 0
    assert set(constant["by_category"]) == {"long", "short"}
    for policy in document["results"]:
        assert policy["identical"] is True
        assert policy["output_tokens"] == plain["output_tokens"]
        assert policy["policy"] in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "magic"), "the policy 'magic' is not known"),
        (("--policies", "constant:4"), "needs a draft model"),
        (("--policies", "plain", "--dataset", "/nowhere/data.jsonl"), "cannot be read"),
        (("--policies", "plain", "--output-json", "/dev/null/out.json"), "cannot be created"),
        (("--policies", "plain", "--max-tokens", "256"), "no room for a prompt"),
    ],
)
def test_bad_input(dynaspec, pair, dataset, arguments, message):
    result = dynaspec("bench", "offline", "--model", pair.target, "--dataset", dataset, *arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert message in result.err


def test_oracle(dynaspec, pair, dataset, tmp_path):
    out = tmp_path / "oracle"
    result = dynaspec(
        *("bench", "oracle", "--model", pair.target, "--draft-model", pair.drafter, "--dataset", dataset),
        *("--policies", "confidence:0.5:8", "--max-tokens", 24, "--rounds", 1, "--output-dir", out),
    )
    assert result.code == 0, result.err
    for text in ("target passes", "oracle", "hindsight: threshold per position", "●", "A target pass takes"):
        assert text in result.out
    document = json.loads((out / "oracle.json").read_text("utf-8"))
    assert set(document["tasks"]) == {"long", "short", "all"}
    sides = document["tasks"]["all"]["sides"]
    assert sides["oracle"]["passes"]["target"] <= sides["constant:5"]["passes"]["target"]
    assert {path.name for path in out.glob("*.png")} == {"speeds.png", "iterations-long.png", "iterations-short.png"}


def test_oracle_bad_input(dynaspec, pair):
    result = dynaspec("bench", "oracle", "--model", pair.target, "--draft-model", pair.drafter, "--policies", "magic")
    assert result.code == 2
    assert "the policy 'magic' is not known" in result.err


def test_offline_on_transformers(dynaspec, pair, dataset, tmp_path):
    out = tmp_path / "out.json"
    result = dynaspec(
        *("bench", "offline", "--model", pair.target, "--draft-model", pair.drafter, "--dataset", dataset),
        *("--backend", "transformers", "--policies", "constant:3,ngram:constant:3", "--max-tokens", 10, "--rounds", 1),
        *("--output-json", out),
    )
    assert result.code == 0, result.err
    assert "transformers" in result.out
    document = json.loads(out.read_text("utf-8"))
    assert document["options"]["backend"] == "transformers"
    plain, constant, lookup = document["results"]
    assert plain["counts"]["drafts"] == 0
    assert constant["counts"]["draft_tokens"] > 0
    assert lookup["policy"] == "ngram:constant:3"
    assert all(policy["identical"] for policy in document["results"])


def test_offline_one_at_a_time(dynaspec, pair, dataset, tmp_path):
    out = tmp_path / "out.json"
    result = dynaspec(
        *("bench", "offline", "--model", pair.target, "--draft-model", pair.drafter, "--dataset", dataset),
        *("--policies", "constant:2", "--max-tokens", 8, "--rounds", 2, "--one-at-a-time", "--output-json", out),
    )
    assert result.code == 0, result.err
    assert "not alternating" in result.out
    document = json.loads(out.read_text("utf-8"))
    assert document["options"]["alternating"] is False
    assert [len(policy["seconds_rounds"]) for policy in document["results"]] == [2, 2]
    assert all(policy["identical"] for policy in document["results"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "sglang"), "--backend is 'sglang'; expected dynaspec, vllm or transformers"),
        (("--backend", "vllm"), "'vllm', which is not installed"),
        (("--backend", "transformers", "--batch-size", 2), "--batch-size is 2; expected 1"),
        (("--backend", "transformers", "--temperature", 1), "--temperature is 1.0; expected 0"),
        (("--backend", "transformers", "--max-model-len", 64), "expected no --max-model-len with"),
        (("--engine-options", "{}x"), "expected a JSON object"),
        (("--engine-options", '{"a": 1}'), "--engine-options is given but --backend is 'dynaspec'"),
    ],
)
def test_offline_bad_input_about_other_engines(dynaspec, pair, dataset, arguments, message):
    result = dynaspec(
        "bench", "offline", "--model", pair.target, "--policies", "plain", "--dataset", dataset, *arguments
    )
    assert result.code == 2
    assert message in result.err
