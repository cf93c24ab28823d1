from __future__ import annotations

import json

import pytest

from dynaspec.control.profile import Profile
from unit.explain.logs import Fixed, Host

USEFUL = Profile({1: {0: 10.0, 4: 12.0}, 4: {0: 10.0, 4: 20.0}, 16: {0: 12.0, 4: 80.0}}, (0.8, 0.6, 0.5, 0.4), 4)
USELESS = Profile({1: {0: 10.0, 4: 40.0}, 4: {0: 10.0, 4: 60.0}}, (0.2, 0.05, 0.0, 0.0), 4)


@pytest.fixture
def saved(tmp_path):
    def save(profile):
        path = tmp_path / "profile.json"
        profile.save(path)
        return path

    return save


def test_a_drafter_that_pays(dynaspec, saved):
    path = saved(USEFUL)
    result = dynaspec("recommend", path, "--json", "--model", "big", "--draft-model", "small")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["recommendation"] == "auto"
    assert [load["requests"] for load in found["loads"]] == [1, 2, 4, 8, 16]
    first, *_, last = found["loads"]
    assert first["best_fixed"] == 4
    speeds = first["tokens_per_second"]
    # AL(4) = 1 + 0.8 + 0.6 + 0.5 + 0.4, in 12 ms instead of 10.
    assert speeds["constant:4"] / speeds["plain"] == pytest.approx(3.3 * 10 / 12, rel=0.1)
    assert speeds["auto"] > 0.9 * speeds["constant:4"]
    assert last["tokens_per_second"]["constant:4"] < last["tokens_per_second"]["plain"]
    assert found["num_speculative_tokens_per_batch_size"][-1][2] == 0
    assert found["speculative_config"]["dynamic_config_path"] == str(path)
    assert found["settings"][0]["text"].startswith("dynaspec serve big --speculative-config")


def test_a_drafter_that_does_not(dynaspec, saved):
    result = dynaspec("recommend", saved(USELESS), "--concurrency", "1,4", "--backend", "vllm")
    assert result.code == 0, result.err
    assert "Do not speculate." in result.out
    assert "does not pay at any load" in result.out
    assert "vllm serve TARGET\n" in result.out
    assert "--speculative-config" not in result.out


def test_the_table_and_the_words(dynaspec, saved):
    result = dynaspec("recommend", saved(USEFUL), "--concurrency", "1 32", "--backend", "vllm")
    assert result.code == 0, result.err
    for text in ("Predicted tokens/s", "best fixed", "(k = 4)", "Configure policy auto.", "vLLM without dynaspec:"):
        assert text in result.out
    assert "note: nothing was measured beyond 16 requests at once" in result.err
    assert "a profile knows no confidences" in result.err


def test_a_log_of_another_host(dynaspec, tmp_path):
    header = {"host": "transformers", "model": "big", "assistant": "small"}
    log = Host(tmp_path / "log", ids=("a",), rates=(0.8,), header=header).run(Fixed(3), 80)
    result = dynaspec("recommend", log)
    assert result.code == 0, result.err
    assert "from dynaspec.hosts.transformers import generate" in result.out
    assert "# assistant: small" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "few"), "--concurrency is 'few'; expected integers of at least 1"),
        (("--concurrency", "0"), "--concurrency is '0'"),
        (("--backend", "sglang"), "--backend is 'sglang'; expected dynaspec, vllm or transformers"),
        (("/nowhere.json",), "cannot be read"),
    ],
)
def test_bad_input(dynaspec, saved, arguments, message):
    result = dynaspec("recommend", saved(USEFUL), *arguments)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert message in result.err
