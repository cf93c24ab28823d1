from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dynaspec import api
from dynaspec.api import LLM, AsyncLLM
from dynaspec.contract.errors import ConfigError, DynaspecError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine
from unit.engine.engines import TOKENIZER, make
from unit.engine.fakes import Rig

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class Built:
    """What ``build_engine`` was called with, and the engine that it gave."""

    config: EngineConfig
    engine: Engine
    rig: Rig


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    seen = Built()

    def build(config: EngineConfig) -> Engine:
        seen.config = config
        seen.engine, seen.rig = make(overlapped=config.async_scheduling)
        return seen.engine

    monkeypatch.setattr(api, "build_engine", build)
    return seen


@pytest.fixture
def llm(built: Built) -> Iterator[LLM]:
    one = LLM("fake")
    yield one
    one.close()


def tokens(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


@pytest.mark.parametrize(
    "prompts",
    ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]], {"prompt": "abc"}, [{"prompt_token_ids": [97, 98, 99]}], ("abc",)],
)
def test_one_prompt_in_every_form(llm: LLM, prompts: Any) -> None:
    [output] = llm.generate(prompts, GREEDY)
    assert (output.prompt_token_ids, output.finished, len(tokens(output))) == ((97, 98, 99), True, 6)


def test_token_ids_may_be_numpys(llm: LLM) -> None:
    [output] = llm.generate(list(np.array([97, 98, 99])), GREEDY)
    assert output.prompt_token_ids == (97, 98, 99)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["long " * 5, "b", "cc", [97, 98]]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 1, 4, 2)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == ["long " * 5, "b", "cc", None]
    assert [len(tokens(output)) for output in outputs] == [9, 1, 4, 2]
    assert llm.generate([], GREEDY) == []


def test_the_default_parameters_are_those_of_sampling_params(llm: LLM) -> None:
    [output] = llm.generate("abc")
    assert len(tokens(output)) == 16 or output.outputs[0].finish_reason == "stop"


def test_a_wrong_number_of_parameters(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 sampling_params were given for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_bad_prompt_stops_everything_and_leaves_nothing(llm: LLM, built: Built) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["abc", ""], GREEDY)
    assert not built.rig.scheduler.unfinished
    assert len(llm.generate(["abc"], GREEDY)) == 1
    llm.verify_integrity()


def test_outputs_are_reported_as_they_grow(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    outputs = llm.generate(["abc", "de"], GREEDY, on_output=lambda i, output: seen.append((i, len(tokens(output)))))
    assert {i for i, _ in seen} == {0, 1}
    assert seen[-1][1] == len(tokens(outputs[seen[-1][0]]))
    assert len(seen) > 2


def test_an_error_in_the_callback_aborts_the_rest(llm: LLM, built: Built) -> None:
    def fail(index: int, output: RequestOutput) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "de"], GREEDY, on_output=fail)
    assert not built.rig.scheduler.unfinished


def test_one_chat_or_several(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(chat, GREEDY)
    assert output.prompt == "user: hi; "
    assert [o.prompt for o in llm.chat([chat, chat], GREEDY)] == ["user: hi; "] * 2


@pytest.mark.parametrize("chat", [[], [{"role": "user"}], [[]], [["hi"]]])
def test_chats_without_sense(llm: LLM, chat: Any) -> None:
    with pytest.raises(RequestError, match="chat"):
        llm.chat(chat, GREEDY)


def test_options_reach_the_configuration(built: Built) -> None:
    LLM("fake", max_num_seqs=3, speculative_config={"method": "ngram"})
    assert (built.config.model, built.config.max_num_seqs) == ("fake", 3)
    assert built.config.speculative_config is not None
    with pytest.raises(ConfigError, match="unknown option 'max_seqs'"):
        LLM("fake", max_seqs=3)


def test_stats_count_what_was_done(llm: LLM) -> None:
    before = llm.stats()
    llm.generate("abc", GREEDY)
    assert (llm.stats() - before).emitted > 0


# --- AsyncLLM -------------------------------------------------------------------------------------------------


@pytest.fixture
def server(built: Built) -> Iterator[AsyncLLM]:
    one = AsyncLLM("fake", async_scheduling=True)
    yield one
    one.close()


async def collect(
    server: AsyncLLM, name: str, prompt: Any = "abc", params: SamplingParams = GREEDY
) -> list[RequestOutput]:
    return [output async for output in server.generate(prompt, params, request_id=name)]


async def test_streams_of_several_callers(server: AsyncLLM) -> None:
    streams = await asyncio.gather(*(collect(server, f"r{i}", f"prompt {i % 3}") for i in range(7)))
    for i, outputs in enumerate(streams):
        assert [output.request_id for output in outputs] == [f"r{i}"] * len(outputs)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert tokens(outputs[-1]) == tokens(streams[i % 3][-1])


async def test_deltas(server: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
    deltas = await collect(server, "a", params=params)
    whole = await collect(server, "b")
    assert sum(map(tokens, deltas), ()) == tokens(whole[-1])


async def test_a_bad_request_hurts_nobody_else(server: AsyncLLM) -> None:
    good = asyncio.create_task(collect(server, "good"))
    with pytest.raises(RequestError, match="empty"):
        await collect(server, "bad", "")
    assert (await good)[-1].finished
    assert server.healthy


async def test_a_caller_that_leaves_early_frees_its_request(server: AsyncLLM, built: Built) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    stream = server.generate("abc", params, request_id="a")
    await anext(stream)
    await stream.aclose()
    assert (await collect(server, "a"))[-1].finished  # the id is free again
    assert not built.rig.scheduler.unfinished


async def test_an_abort_from_outside_ends_the_stream(server: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    stream = server.generate("abc", params, request_id="a")
    await anext(stream)
    await server.abort("a")
    *_, last = [output async for output in stream]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    await server.abort("nobody")
    assert server.healthy


async def test_an_error_of_the_engine_reaches_everyone(
    server: AsyncLLM, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(built.rig.target, "forward", fail)
    results = await asyncio.gather(*(collect(server, name) for name in "abc"), return_exceptions=True)
    assert all(isinstance(result, DynaspecError) for result in results)
    assert not server.healthy
    with pytest.raises(DynaspecError, match="stopped"):
        await collect(server, "later")


async def test_after_closing_nothing_is_taken(built: Built) -> None:
    server = AsyncLLM("fake")
    params = SamplingParams(temperature=0.0, max_tokens=200)
    stream = server.generate("abc", params, request_id="a")
    await anext(stream)
    server.close()
    with pytest.raises(DynaspecError):
        _ = [output async for output in stream]
    with pytest.raises(DynaspecError, match="stopped"):
        await collect(server, "later")
    assert TOKENIZER.vocab_size == built.rig.vocab
