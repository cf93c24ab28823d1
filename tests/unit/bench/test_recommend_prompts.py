"""What is recommended after some prompts were decoded in several ways."""

from __future__ import annotations

import pytest

from dynaspec.bench.datasets import BenchPrompt
from dynaspec.bench.decoders import DecodingHost
from dynaspec.bench.methods import Way, Ways
from dynaspec.bench.offline import PolicyResult
from dynaspec.bench.recommend_prompts import LEAST_PROMPTS, affordable, decide
from dynaspec.contract.sampling_params import SamplingParams
from unit.bench.fakes import FakeDecoder

GIVEN = {
    "plain": None,
    "ngram": {"method": "ngram", "policy": "constant"},
    "head": {"method": "eagle3", "model": "head", "policy": "constant"},
    "auto": {"method": "eagle3", "model": "head", "policy": "auto"},
}


def results(different=None, **speedups):
    """Each way's speed-up in every round."""
    rounds = len(next(iter(speedups.values())))
    all_of_it = {"plain": (1.0,) * rounds} | speedups
    return [PolicyResult(name, (), times, int(name == different)) for name, times in all_of_it.items()]


def advice(**speedups):
    return decide(results(**speedups), GIVEN)


def test_auto_where_it_is_the_best():
    found = advice(ngram=(1.1, 1.1, 1.1, 1.1), auto=(1.5, 1.4, 1.5, 1.4))
    assert found.way == "auto"
    assert found.speculative_config == GIVEN["auto"]
    assert found.reasons == (
        "auto is 1.45 times as fast as plain decoding (1.40 to 1.50 in 4 rounds).",
        "The best other way, ngram, has 1.10 (1.10 to 1.10).",
    )


def test_auto_within_the_noise_of_the_best():
    found = advice(head=(1.6, 1.4, 1.7, 1.6), auto=(1.5, 1.5, 1.5, 1.5))
    assert found.way == "auto"
    assert "head was 1.07 times as fast as auto (0.93 to 1.13), which is within the noise: auto is" in found.reasons[1]


def test_auto_where_the_best_is_hardly_faster():
    assert advice(head=(1.52, 1.52, 1.52, 1.52), auto=(1.5, 1.5, 1.5, 1.5)).way == "auto"


def test_another_way_where_it_is_clearly_faster():
    found = advice(ngram=(1.1,) * 4, head=(1.8, 1.7, 1.8, 1.7), auto=(1.5, 1.5, 1.5, 1.5))
    assert found.way == "head"
    assert found.speculative_config == GIVEN["head"]
    assert found.reasons[1] == "It was 1.17 times as fast as auto (1.13 to 1.20)."


def test_another_way_where_only_that_pays():
    assert advice(head=(1.2, 1.2, 1.2, 1.2), auto=(1.3, 0.9, 1.3, 0.9)).way == "head"


def test_nothing_where_nothing_is_faster_for_certain():
    found = advice(ngram=(0.9, 0.9, 0.9, 0.9), auto=(1.2, 1.0, 1.2, 1.1))
    assert found.way == "plain"
    assert found.speculative_config is None
    assert found.reasons[-2] == "So nothing is clearly faster than plain decoding."
    assert found.reasons[-1].startswith("The rounds differ too much: ")
    assert advice(auto=(0.9,) * 4).reasons[-1] == "So nothing is clearly faster than plain decoding."


def test_luck_on_odd_rounds_does_not_decide():
    assert advice(head=(9.0, 1.0, 9.0, 1.0)).way == "plain"


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_few_rounds(rounds):
    assert advice(auto=(1.5,) * rounds).way == "auto"


def test_a_way_with_other_output_is_out_of_the_question():
    found = decide(results("head", head=(3.0,) * 4, auto=(1.2,) * 4), GIVEN)
    assert found.way == "auto"
    assert found.reasons[-1] == "head is out of the question: 1 of its outputs were not plain decoding's."
    assert decide(results("auto", auto=(3.0,) * 4), GIVEN).way == "plain"


class Clocked(FakeDecoder):
    """One that takes a second a prompt, by a clock that nothing else moves."""

    max_model_len = 64
    closed = 0

    def __init__(self, clock):
        super().__init__()
        self._clock = clock
        self.tokenizer = self

    def encode(self, text, special_tokens=True):
        return [1]

    def generate(self, prompts, sampling_params, /):
        self._clock[0] += len(prompts)
        return super().generate(prompts, sampling_params)

    def close(self):
        Clocked.closed += 1


@pytest.mark.parametrize(
    ("seconds", "rounds", "expected"), [(600, 4, 40), (80, 4, 10), (80, 2, 20), (1, 4, LEAST_PROMPTS)]
)
def test_as_many_prompts_as_there_is_time_for(monkeypatch, seconds, rounds, expected):
    clock = [0.0]
    monkeypatch.setattr("dynaspec.bench.decoders.time.perf_counter", lambda: clock[0])
    before = Clocked.closed
    host = DecodingHost(lambda spec: Clocked(clock), alternating=True)
    found = Ways("target", (Way("plain", None), Way("ngram", GIVEN["ngram"])), {})
    prompts = [BenchPrompt(str(i)) for i in range(40)]
    assert affordable(host, found, prompts, SamplingParams(max_tokens=4), rounds, seconds, 1, chat=False) == expected
    assert Clocked.closed == before + 1


def test_fewer_prompts_than_are_measured_in_any_case(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("dynaspec.bench.decoders.time.perf_counter", lambda: clock[0])
    host = DecodingHost(lambda spec: Clocked(clock), alternating=True)
    found = Ways("target", (Way("plain", None),), {})
    assert affordable(host, found, [BenchPrompt("a")], SamplingParams(max_tokens=4), 4, 0.1, 8, chat=False) == 1
