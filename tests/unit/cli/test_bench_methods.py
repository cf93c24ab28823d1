from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynaspec.contract.methods import METHODS
from dynaspec.control.config import SpeculativeConfig


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"category": "words", "prompt": "the quick brown fox"}, {"category": "numbers", "turns": ["1 2 3"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture
def foreign(tmp_path):
    """A head for another target, as far as it gets."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 7}))
    return folder


def test_methods(dynaspec, pair, dataset, foreign, tmp_path):
    out = tmp_path / "results" / "out.json"
    result = dynaspec(
        *("bench", "methods", "--model", pair.target, "--dataset", dataset, "--max-tokens", 12, "--rounds", 2),
        *("--speculative-model", pair.drafter, "--speculative-model", foreign, "--num-speculative-tokens", 3),
        *("--output-json", out, "--output-dir", tmp_path / "pictures"),
    )
    assert result.code == 0, result.err
    assert "2 prompts, up to 12 tokens each, greedy, one request at a time, 2 rounds" in result.out
    assert "Speed-up by category" in result.out
    assert "note: left out: eagle3, auto foreign, auto foreign with suffixes: " in result.err
    assert (tmp_path / "pictures" / "methods.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(out.read_text("utf-8"))
    assert set(document) == {"schema", "provenance", "options", "prompts_cut", "results", "left_out"}
    found = {entry["policy"]: entry for entry in document["results"]}
    assert {"plain", "draft_model", "ngram", "auto drafter"} <= found.keys()
    assert {name.partition(" ")[0] for name in (*found, *document["left_out"])} == {*METHODS, "plain", "auto"}
    for name, entry in found.items():
        assert entry["identical"] is True
        assert set(entry["speedup_by_category"]) == {"words", "numbers"}
        assert name in result.out
        if name != "plain":
            SpeculativeConfig.parse(entry["speculative_config"])
    assert found["plain"]["speculative_config"] is None
    assert found["draft_model"]["counts"]["drafted_per_pos"][3:] == []
    assert found["draft_model"]["target_rows_per_request_step"] > 2
    assert 0 < found["draft_model"]["drafting_share"] < 1


def test_the_head_that_comes_along(dynaspec, pair, dataset, monkeypatch, tmp_path):
    monkeypatch.setattr("dynaspec.cli.demo._FILE", Path(pair.target).name)
    monkeypatch.setattr("dynaspec.cli.demo.demo_head", lambda: pair.drafter)
    out = tmp_path / "out.json"
    result = dynaspec(
        *("bench", "methods", "--model", pair.target, "--dataset", dataset, "--max-tokens", 8, "--rounds", 1),
        *("--methods", "draft_model:confidence:0.4,auto", "--temperature", 0.8, "--output-json", out),
    )
    assert result.code == 0, result.err
    document = json.loads(out.read_text("utf-8"))
    assert [entry["policy"] for entry in document["results"]][:3] == ["plain", "draft_model:confidence:0.4", "auto"]
    assert all(entry["identical"] for entry in document["results"])
    assert document["results"][1]["speculative_config"]["model"] == pair.drafter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "magic"), "--methods has 'magic'; expected some of plain, "),
        (("--methods", "draft_model"), "'draft_model' needs a draft model's checkpoint, which is not given"),
        (("--methods", "ngram", "--speculative-model", "/nowhere"), "--methods has neither that nor 'auto'"),
        (("--methods", "draft_model", "--speculative-model", "/nowhere"), "nothing is left to compare with plain"),
        (("--dataset", "/nowhere.jsonl"), "cannot be read"),
        (("--output-dir", "/dev/null/out"), "cannot be created"),
        (("--max-tokens", 256), "no room for a prompt"),
        (("--num-speculative-tokens", 100), "num_speculative_tokens is 100; expected an integer from 1 to 64"),
    ],
)
def test_bad_input(dynaspec, pair, dataset, arguments, message):
    result = dynaspec("bench", "methods", "--model", pair.target, "--dataset", dataset, *arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert message in result.err
