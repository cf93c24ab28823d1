from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dynaspec.api import LLM
from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from unit.api.built import GREEDY, Built, tokens


@pytest.fixture
def llm(built: Built) -> Iterator[LLM]:
    one = LLM("fake")
    yield one
    one.close()


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


def test_a_chat_s_template_has_written_the_special_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = llm.tokenizer.encode
    first = [llm.tokenizer.encode("!")[0]]

    def encode(text: str, *, special_tokens: bool = True) -> list[int]:
        return first * special_tokens + plain(text, special_tokens=special_tokens)

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    seen: list[str | None] = []
    [output] = llm.chat(
        [{"role": "user", "content": "hi"}], GREEDY, on_output=lambda i, output: seen.append(output.prompt)
    )
    assert list(output.prompt_token_ids) == plain("user: hi; ")
    assert {output.prompt, *seen} == {"user: hi; "}


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
