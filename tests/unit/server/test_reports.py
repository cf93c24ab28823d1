"""``metrics``, vLLM's, and ``timings``, llama.cpp's."""

from __future__ import annotations

from typing import Any

import pytest

from dynaspec import AsyncLLM
from unit.server.serving import Client, make_app

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "one two three one two"}]},
    TEXT: {"prompt": "one two three one two"},
}
SOME = {"max_tokens": 24, "temperature": 0}
DRAFTS = {
    *("mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"),
    *("num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens"),
}


def check(told: dict[str, Any], *, detailed: bool) -> None:
    """The numbers agree with each other, as vLLM's do."""
    steps, accepted, histogram = told["num_spec_steps"], told["num_accepted_draft_tokens"], told["acceptance_histogram"]
    assert told["num_spec_tokens"] == 3
    assert len(histogram) == 4
    assert sum(histogram) == steps > 0
    assert sum(count * number for count, number in enumerate(histogram)) == accepted
    assert told["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert told["draft_acceptance_rate"] == pytest.approx(accepted / told["num_draft_tokens"])
    assert told.keys() == DRAFTS | ({"per_step_accepted", "per_step_drafted"} if detailed else set())
    if detailed:
        assert len(told["per_step_drafted"]) == steps
        assert sum(told["per_step_accepted"]) == accepted
        assert sum(told["per_step_drafted"]) == told["num_draft_tokens"]


@pytest.mark.parametrize("path", BODIES)
async def test_nobody_asks(client: Client, path: str) -> None:
    answer = await client.ask(path, **BODIES[path], **SOME)
    assert not answer.keys() & {"metrics", "timings"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("level", ["summary", "detailed"])
async def test_drafts_where_the_server_tells_them(llm: AsyncLLM, path: str, level: str) -> None:
    client = Client(make_app(llm, per_request_spec_decode_metrics=level))
    metrics = (await client.ask(path, **BODIES[path], **SOME))["metrics"]
    assert metrics.keys() == {"speculative_decoding"}
    check(metrics["speculative_decoding"], detailed=level == "detailed")
    chunks = await client.stream(path, **BODIES[path], **SOME, stream_options={"include_usage": True})
    assert [chunk["metrics"] for chunk in chunks if "metrics" in chunk] == [metrics]
    assert "metrics" in chunks[-1]
    chunks = await client.stream(path, **BODIES[path], **SOME)
    assert not any("metrics" in chunk for chunk in chunks)
    assert "metrics" not in await client.ask(path, **BODIES[path], max_tokens=4, n=2)
    await client.close()


@pytest.mark.parametrize("path", BODIES)
async def test_drafts_where_the_request_asks(client: Client, path: str) -> None:
    answer = await client.ask(path, **BODIES[path], **SOME, speculation={"metrics": "summary"})
    check(answer["metrics"]["speculative_decoding"], detailed=False)
    assert "per_step" not in answer["choices"][0]["speculation"]
    nothing = await client.ask(path, **BODIES[path], max_tokens=1, speculation={"metrics": "summary"})
    told = nothing["metrics"]["speculative_decoding"]
    assert (told["mean_acceptance_length"], told["draft_acceptance_rate"], told["acceptance_histogram"]) == (
        1,
        0,
        [0] * 4,
    )


@pytest.mark.parametrize("path", BODIES)
async def test_times(llm: AsyncLLM, path: str) -> None:
    client = Client(make_app(llm, enable_per_request_metrics=True))
    answer = await client.ask(path, **BODIES[path], **SOME)
    told, tokens = answer["metrics"], answer["usage"]["completion_tokens"]
    assert told.keys() == {
        *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")
    }
    assert told["mean_itl_ms"] == pytest.approx(told["generation_time_ms"] / (tokens - 1))
    inference_ms = told["time_to_first_token_ms"] + told["generation_time_ms"]
    assert told["tokens_per_second"] == pytest.approx(1e3 * tokens / inference_ms)
    assert told["queue_time_ms"] >= 0
    assert "mean_itl_ms" not in (await client.ask(path, **BODIES[path], max_tokens=1))["metrics"]
    await client.close()


@pytest.mark.parametrize("path", BODIES)
async def test_timings(client: Client, path: str) -> None:
    answer = await client.ask(path, **BODIES[path], **SOME, timings_per_token=True)
    told, usage = answer["timings"], answer["usage"]
    assert told["predicted_n"] == usage["completion_tokens"]
    assert told["cache_n"] + told["prompt_n"] == usage["prompt_tokens"]
    assert told["predicted_per_token_ms"] == pytest.approx(told["predicted_ms"] / told["predicted_n"])
    assert told["predicted_per_second"] == pytest.approx(1e3 / told["predicted_per_token_ms"])
    assert 0 < told["draft_n_accepted"] <= told["draft_n"]
    chunks = await client.stream(path, **BODIES[path], **SOME, timings_per_token=True)
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert counts == sorted(counts)
    assert counts[-1] == usage["completion_tokens"]
    assert len(counts) > 1
