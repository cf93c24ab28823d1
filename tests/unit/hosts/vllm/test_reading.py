"""vLLM's objects as plain values, on objects that have the attributes that vLLM's have."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dynaspec.hosts.vllm.driver import (
    Row,
    Verified,
    drafter_length,
    rows_of,
    sampled_of,
    speculation_of,
    verified_of,
    wish_of,
)
from dynaspec.hosts.vllm.settings import VllmSpeculation


def request(name: str = "a", **other: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "request_id": name,
        "num_computed_tokens": 11,
        "num_tokens": 12,
        "num_prompt_tokens": 10,
        "num_output_tokens": 2,
        "num_output_placeholders": 0,
        "max_tokens": 20,
        "sampling_params": SimpleNamespace(temperature=0.5, extra_args=None),
    }
    return SimpleNamespace(**{**values, **other})


def rows(*requests: SimpleNamespace, count: int, drafts: int = 0, max_model_len: int = 100) -> list[Row]:
    output = SimpleNamespace(
        num_scheduled_tokens={r.request_id: count for r in requests},
        scheduled_spec_decode_tokens={r.request_id: [1] * drafts for r in requests} if drafts else {},
    )
    return rows_of({r.request_id: r for r in requests}, output, max_model_len, lambda r: 3)


def test_a_decoding_request() -> None:
    (row,) = rows(request(), count=4, drafts=3)
    assert row == Row(
        id="a",
        rows=4,
        drafts=3,
        computed=11,
        decoding=True,
        goes_on=True,
        length=13,
        room=16,  # of 20 tokens it has 2, gets 1 in this step and 1 beside the drafts of the next
        max_draft=3,
        temperature=0.5,
        space=86,  # of the model's 100
    )


def test_a_prompt_that_is_read_in_parts() -> None:
    new = {"num_output_tokens": 0, "num_tokens": 30, "num_prompt_tokens": 30, "num_computed_tokens": 8}
    (row,) = rows(request(**new), count=10)
    assert (row.decoding, row.goes_on) == (False, False)
    (row,) = rows(request(**new), count=22)
    assert (row.decoding, row.goes_on, row.length, row.room) == (False, True, 31, 18)


def test_a_prompt_of_one_more_token_is_no_decoding() -> None:
    (row,) = rows(request(num_output_tokens=0, num_computed_tokens=9, num_tokens=10), count=1)
    assert (row.decoding, row.goes_on) == (False, True)


def test_a_preempted_request_reads_all_it_had() -> None:
    (row,) = rows(request(num_computed_tokens=0), count=12)
    assert (row.decoding, row.goes_on, row.length) == (False, True, 13)


def test_tokens_in_flight_count_as_if_they_were_there() -> None:
    # Its latest step has a row and two drafts, and their output is awaited: three placeholders.
    flying = request(num_computed_tokens=14, num_output_placeholders=3)
    (row,) = rows(flying, count=3, drafts=2)
    assert (row.decoding, row.goes_on, row.length, row.room) == (True, True, 16, 13)


def test_room_ends_with_the_request_and_with_the_model() -> None:
    assert rows(request(max_tokens=3), count=1)[0].room == 0
    assert rows(request(max_tokens=5), count=1)[0].room == 1
    assert rows(request(), count=1, max_model_len=16)[0].room == 2
    assert rows(request(), count=1, max_model_len=13)[0].room == 0
    assert rows(request(max_tokens=3), count=1, max_model_len=16)[0].space == 2


@pytest.mark.parametrize(
    ("extra_args", "wish"),
    [
        (None, None),
        ({}, None),
        ({"other": 1}, None),
        ({"dynaspec": {}}, None),
        ({"dynaspec": {"num_speculative_tokens": 0}}, 0),
        ({"dynaspec": {"num_speculative_tokens": 3}}, 3),
        ({"dynaspec": '{"num_speculative_tokens": 2}'}, 2),
    ],
)
def test_a_request_may_say_how_much_it_wants_drafted(extra_args: Any, wish: int | None) -> None:
    assert wish_of(extra_args) == wish


@pytest.mark.parametrize("told", [3, "two", "[2]", {"num_speculative_tokens": -1}, {"num_speculative_tokens": True}])
def test_a_wish_that_cannot_be_understood_is_said_and_left(told: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert wish_of({"dynaspec": told}) is None
    assert len(caplog.records) == 1


def test_what_came_of_a_step() -> None:
    output = SimpleNamespace(num_scheduled_tokens={"a": 4, "b": 4, "c": 1, "gone": 1}, num_invalid_spec_tokens={"b": 2})
    ran = SimpleNamespace(req_id_to_index={"b": 0, "a": 1, "c": 2, "gone": 3}, sampled_token_ids=[[5, 6], [7], [], [8]])
    sampled = sampled_of(output, ran)
    assert sampled == {"a": 1, "b": 2, "c": 0, "gone": 1}
    told = {
        0: SimpleNamespace(outputs=[SimpleNamespace(request_id="b", new_token_ids=[5])]),
        1: SimpleNamespace(outputs=[SimpleNamespace(request_id="a", new_token_ids=[7])]),
    }
    assert verified_of(output, sampled, told) == {"a": Verified(1, 1), "b": Verified(2, 1, invalid=2)}


def test_a_step_that_sampled_nothing() -> None:
    output = SimpleNamespace(num_scheduled_tokens={"a": 4}, num_invalid_spec_tokens=None)
    assert sampled_of(output, SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[])) == {}
    told = {0: SimpleNamespace(outputs=[SimpleNamespace(request_id="a", new_token_ids=[])])}
    assert verified_of(output, {}, told) == {}


def config(**spec: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "method": "draft_model",
        "num_speculative_tokens": 5,
        "model": "drafter",
        "prompt_lookup_max": None,
        "prompt_lookup_min": None,
        "num_speculative_tokens_per_batch_size": None,
        "parallel_drafting": False,
        "draft_model_config": SimpleNamespace(max_model_len=200),
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**{**values, **spec}),
        parallel_config=SimpleNamespace(data_parallel_size=2, data_parallel_rank=1),
        model_config=SimpleNamespace(model="target", max_model_len=256),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        use_v2_model_runner=False,
        instance_id="ab1",
        device_config=SimpleNamespace(device_type="cuda"),
    )


def test_what_vllm_s_configuration_says() -> None:
    assert speculation_of(config(num_speculative_tokens_per_batch_size=[[1, 4, 5]])) == VllmSpeculation(
        method="draft_model",
        longest=5,
        model="drafter",
        target="target",
        table=((1, 4, 5),),
        asynchronous=True,
        ranks=2,
        rank=1,
    )
    assert speculation_of(config(method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)).lookup == (1, 3)
    on_cpu = config()
    on_cpu.device_config.device_type = "cpu"
    assert speculation_of(on_cpu).on_cpu


def test_how_long_requests_may_get_before_the_drafter_stops_for_all() -> None:
    assert drafter_length(config()) == 195
    assert drafter_length(config(draft_model_config=None)) == 251
    assert drafter_length(config(method="dflash")) == 194
    second = config()
    second.use_v2_model_runner = True
    assert drafter_length(second) is None
