from __future__ import annotations

import json
from dataclasses import replace

from dynaspec.contract.outputs import CompletionOutput, Logprob, RequestOutput
from dynaspec.server.inputs import completion_params
from dynaspec.server.protocol.completions import CompletionRequest
from soak_callers import Choice, draw_requests, known_answer

SPECS = draw_requests(200, vocab_size=50, longest_prompt=9, most_tokens=7, seed=1)


def test_requests_are_of_all_kinds_and_always_the_same() -> None:
    assert draw_requests(200, vocab_size=50, longest_prompt=9, most_tokens=7, seed=1) == SPECS
    assert {len(spec.prompt) for spec in SPECS} == set(range(1, 10))
    assert {spec.params.max_tokens for spec in SPECS} == set(range(1, 8))
    assert {spec.params.n for spec in SPECS} == {1, 2}
    assert all(0 < token < 50 for spec in SPECS for token in spec.prompt)
    assert all(spec.params.greedy or spec.params.seed is not None for spec in SPECS)


def test_a_server_reads_the_same_parameters_from_its_body() -> None:
    for spec in SPECS:
        body = json.loads(json.dumps(spec.body(stream=False)))
        asked = CompletionRequest.model_validate(body)
        params = completion_params(asked)
        assert asked.prompt == list(spec.prompt)
        assert asked.return_token_ids
        assert replace(params, output_kind=spec.params.output_kind) == spec.params


def test_a_known_answer_is_what_an_engine_gives() -> None:
    logprobs = ({5: Logprob(-0.5, 1), 6: Logprob(-2.0, 2)}, {7: Logprob(-1.5, 1)})
    outputs = (
        CompletionOutput(0, "ab", (6, 7), None, logprobs, "stop", "b"),
        CompletionOutput(1, "c", (5,), finish_reason="length"),
    )
    assert known_answer(RequestOutput("r", None, (1,), outputs, True)) == [
        Choice((6, 7), "ab", (-2.0, -1.5), "stop", "b"),
        Choice((5,), "c", (), "length"),
    ]


def test_what_may_still_become_an_answer() -> None:
    whole = Choice((1, 2, 3), "abc", (-1.0, -2.0, -3.0), "length")
    assert Choice().begins(whole)
    assert Choice((1, 2), "ab", (-1.0, -2.0)).begins(whole)
    assert whole.begins(whole)
    assert not Choice((1, 3), "ab").begins(whole)
    assert not Choice((1,), "b").begins(whole)
    assert not Choice((1,), "a", (-1.5,)).begins(whole)
    assert not Choice((1, 2, 3, 4), "abc").begins(whole)
