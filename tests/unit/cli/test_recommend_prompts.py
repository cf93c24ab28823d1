from __future__ import annotations

import json
import shlex

import pytest

from dynaspec.bench import recommend_prompts


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("the quick brown fox\n\n1 2 3 4\nthe lazy dog\n", "utf-8")
    return path


@pytest.fixture
def few(pair, prompts):
    return ("recommend", "--model", pair.target, "--prompts", prompts, "--max-tokens", 8, "--rounds", 2)


@pytest.fixture
def choose(monkeypatch):
    """Decides as is told, whatever was measured."""

    def choose(way):
        def decide(results, given):
            assert len({len(result.runs) for result in results}) == 1
            return recommend_prompts.Advice(way, given[way], ("It is told so.",))

        monkeypatch.setattr(recommend_prompts, "decide", decide)

    return choose


def test_what_is_printed_can_be_used(dynaspec, pair, few, choose):
    choose("draft_model")
    result = dynaspec(*few, "--speculative-model", pair.drafter)
    assert result.code == 0, result.err
    assert "3 prompts, up to 8 tokens each, greedy, one request at a time, 2 rounds" in result.out
    assert "It is told so." in result.out
    *_, config, _, command = result.out.strip().splitlines()
    assert json.loads(config) == {"method": "draft_model", "policy": "constant", "model": pair.drafter}
    program, *words = shlex.split(command)
    assert program == "dynaspec"
    assert json.loads(words[-1]) == json.loads(config)
    assert dynaspec(*words, "--max-tokens", 2, "the").code == 0
    assert "decoding 3 prompts in " in result.err


def test_no_speculation(dynaspec, pair, few, choose):
    choose("plain")
    result = dynaspec(*few)
    assert result.code == 0, result.err
    assert "Configure no speculation:" in result.out
    assert result.out.strip().endswith(f"dynaspec generate --model {pair.target}")
    assert "note: left out: draft_model: it needs a draft model's checkpoint" in result.err


def test_json(dynaspec, few):
    result = dynaspec(*few, "--json", "--num-prompts", 2, "--concurrency", 2, "--methods", "ngram")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["recommendation"] in ("plain", "ngram")
    assert document["reasons"]
    assert "provenance" in document
    assert document["options"]["num_prompts"] == 2
    assert document["options"]["prompts_in_file"] == 3
    assert document["options"]["engine"]["max_num_seqs"] == 2
    chosen = {entry["policy"]: entry["speculative_config"] for entry in document["results"]}
    assert list(chosen) == ["plain", "ngram"]
    assert document["speculative_config"] == chosen[document["recommendation"]]


def test_too_little_time_for_all(dynaspec, few, monkeypatch):
    afford = recommend_prompts.affordable

    def hurried(host, found, prompts, params, rounds, seconds, *rest, **more):
        """A thousandth of the time: however fast the machine is, it is too little."""
        assert seconds == pytest.approx(0.6)
        return afford(host, found, prompts, params, rounds, seconds / 1000, *rest, **more)

    monkeypatch.setattr(recommend_prompts, "affordable", hurried)
    result = dynaspec(*few, "--minutes", 0.01, "--methods", "ngram", "--max-tokens", 200)
    assert result.code == 0, result.err
    assert "note: in 0.01 minutes there is time for 2 of 3 prompts" in result.err
    assert "2 of 3 prompts, up to 200 tokens each" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there are neither files nor --prompts; expected a profile, decision logs, or prompts"),
        (("--methods", "ngram"), "there are neither files nor --prompts"),
        (("log.jsonl", "--prompts", "p.txt", "--model", "m"), "--prompts is p.txt but log.jsonl is given too"),
        (("--prompts", "p.txt"), "--prompts is p.txt but there is no --model; expected the target's checkpoint"),
        (("--prompts", "p.txt", "--model", "m", "--backend", "vllm"), "--backend is 'vllm'; expected none with"),
        (("--prompts", "p.txt", "--model", "m", "--concurrency", "1,4"), "--concurrency is 1, 4; expected one number"),
        (("--prompts", "/nowhere.txt", "--model", "m"), "cannot be read"),
        (("log.jsonl", "--minutes", 2), "--minutes is given without --prompts; expected both, or no --minutes"),
        (("log.jsonl", "--num-prompts", 2), "--num-prompts is given without --prompts"),
        (("log.jsonl", "--draft-model", "a", "--draft-model", "b"), "--draft-model is given several times"),
    ],
)
def test_combinations_that_mean_nothing(dynaspec, arguments, message):
    result = dynaspec("recommend", *arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert message in result.err
    assert result.err.count("\n") == 1
