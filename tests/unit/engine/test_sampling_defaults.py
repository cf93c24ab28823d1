"""What requests leave out comes from the checkpoint, a folder, an override, or is neutral."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynaspec import AsyncLLM, SamplingParams
from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.sampling_defaults import NEUTRAL, SamplingDefaults, sampling_defaults
from support.checkpoints import Pair
from support.engines import open_llm
from unit.server.serving import Client, make_app

RECOMMENDED = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": None,
    "repetition_penalty": 1.05,
    "max_new_tokens": 40,
    "do_sample": True,
    "eos_token_id": [5, 6],
}
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 40}
GREEDY = {"temperature": 0.0, "max_new_tokens": 5}
HI = [{"role": "user", "content": "hi"}]


def folder(path: Path, content: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return str(path)


def defaults(model: str, **options: Any) -> SamplingDefaults:
    return sampling_defaults(EngineConfig.build(model=model, **options))


def test_the_checkpoints_are_taken_unless_the_option_says_otherwise(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path, RECOMMENDED)
    assert defaults(checkpoint) == SamplingDefaults(SAMPLING)
    assert defaults(checkpoint, generation_config="auto") == SamplingDefaults(SAMPLING)
    assert defaults(checkpoint, generation_config="vllm") == NEUTRAL


def test_models_without_recommendations_have_neutral_ones(tmp_path: Path) -> None:
    assert defaults(str(tmp_path)) == NEUTRAL
    assert defaults(folder(tmp_path, {"eos_token_id": 5, "do_sample": False})) == NEUTRAL
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    folder(tmp_path, RECOMMENDED)
    assert defaults(str(gguf)) == NEUTRAL
    assert NEUTRAL.params() == SamplingParams()


def test_a_folders_file_also_limits_every_request(tmp_path: Path) -> None:
    checkpoint, other = folder(tmp_path / "a", {"temperature": 0.1}), folder(tmp_path / "b", RECOMMENDED)
    assert defaults(checkpoint, generation_config=other) == SamplingDefaults(SAMPLING, 40, (5, 6))


def test_an_override_wins_and_limits_every_request(tmp_path: Path) -> None:
    checkpoint = folder(tmp_path, RECOMMENDED)
    found = defaults(checkpoint, override_generation_config='{"temperature": 0.2, "max_new_tokens": 9}')
    assert found == SamplingDefaults(SAMPLING | {"temperature": 0.2, "max_tokens": 9}, 9)
    found = defaults(checkpoint, generation_config="vllm", override_generation_config={"top_k": 3})
    assert found == SamplingDefaults({"top_k": 3})


def test_an_overrides_other_parameters_are_ignored_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert defaults(str(tmp_path), override_generation_config={"do_sample": True}) == NEUTRAL
    [record] = caplog.records
    assert record.getMessage().startswith("override_generation_config: do_sample is ignored; expected one of")


def test_the_log_says_that_defaults_are_not_neutral(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dynaspec")
    defaults(folder(tmp_path, RECOMMENDED), generation_config="vllm")
    assert not caplog.records
    defaults(folder(tmp_path, RECOMMENDED))
    [record] = caplog.records
    assert "temperature=0.7, top_p=0.8, top_k=20" in record.getMessage()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"temperature": "hot"},
            "json: temperature is 'hot'; expected a number.*generation_config='vllm' does without",
        ),
        ({"max_new_tokens": 0}, "json: max_tokens is 0; expected an integer"),
        ("[]", "json holds list; expected a JSON object"),
        ("{", "json is not valid JSON"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        defaults(folder(tmp_path, content))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "/nowhere"}, "generation_config is '/nowhere', a folder without generation_config.json"),
        ({"generation_config": "vLLM"}, "expected 'auto', 'vllm' or a folder with that file"),
        ({"override_generation_config": {"top_p": 2}}, "override_generation_config: top_p is 2; expected"),
        ({"override_generation_config": "{"}, "override_generation_config: '{' is not JSON; expected an object"),
        ({"override_generation_config": "[]"}, "override_generation_config: .*given: "),
    ],
)
def test_options_that_cannot_be_used(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(str(tmp_path), **options)


@pytest.fixture(scope="module")
def greedy(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with makers who recommend greedy decoding."""
    path = tmp_path_factory.mktemp("recommending") / "target"
    shutil.copytree(tiny.target, path)
    return folder(path, json.loads((path / "generation_config.json").read_text()) | GREEDY)


def test_llm_uses_them_where_it_is_given_none(greedy: str) -> None:
    with open_llm(greedy) as llm:
        own = llm.get_default_sampling_params()
        assert own == SamplingParams(temperature=0.0, max_tokens=5)
        own.max_tokens = 1
        assert llm.get_default_sampling_params().max_tokens == 5
        [by_default] = llm.generate(["1 2 3"])
        [asked] = llm.generate(["1 2 3"], SamplingParams(temperature=0.0, max_tokens=5))
        assert by_default.outputs[0].token_ids == asked.outputs[0].token_ids
        [given] = llm.generate(["1 2 3"], SamplingParams(seed=1, ignore_eos=True))
        assert len(given.outputs[0].token_ids) == 16
        [chatted], [known] = llm.chat(HI), llm.chat(HI, own)
        assert chatted.outputs[0].token_ids[:1] == known.outputs[0].token_ids


def test_a_folders_end_tokens_end_a_text_too(tiny: Pair, tmp_path: Path) -> None:
    with open_llm(tiny.target) as llm:
        [whole] = llm.generate(["1 2 3"], SamplingParams(temperature=0.0, max_tokens=8))
    end = whole.outputs[0].token_ids[3]
    at = whole.outputs[0].token_ids.index(end)
    with open_llm(tiny.target, generation_config=folder(tmp_path, {"eos_token_id": [end]})) as llm:
        [ended] = llm.generate(["1 2 3"], SamplingParams(temperature=0.0, max_tokens=8))
    assert ended.outputs[0].token_ids == whole.outputs[0].token_ids[: at + 1]
    assert ended.outputs[0].finish_reason == "stop"


async def test_servers_use_them_for_what_requests_leave_out(greedy: str) -> None:
    async with AsyncLLM(greedy, max_num_seqs=4) as llm:
        client = Client(make_app(llm))
        asked = await client.ask("/v1/chat/completions", messages=HI, temperature=0, max_tokens=5)
        by_default = await client.ask("/v1/chat/completions", messages=HI)
        assert by_default["choices"] == asked["choices"]
        assert by_default["usage"]["completion_tokens"] <= 5
        longer = await client.ask("/v1/chat/completions", messages=HI, max_tokens=9, ignore_eos=True)
        assert longer["usage"]["completion_tokens"] == 9
        completions = [
            await client.ask("/v1/completions", prompt="1 2", ignore_eos=True, **fields)
            for fields in ({}, {"temperature": 0, "max_tokens": 16})
        ]
        assert completions[0]["choices"] == completions[1]["choices"]
        assert completions[0]["usage"]["completion_tokens"] == 16
        long = [{"role": "user", "content": "x" * 300}]
        fitting = await client.ask(
            "/v1/chat/completions", messages=long, truncate_prompt_tokens=llm.max_model_len - 2, ignore_eos=True
        )
        assert fitting["usage"]["completion_tokens"] == 2
        await client.close()


async def test_a_limit_holds_for_requests_that_ask_for_more(tiny: Pair) -> None:
    async with AsyncLLM(tiny.target, max_num_seqs=4, override_generation_config={"max_new_tokens": 3}) as llm:
        client = Client(make_app(llm))
        for path, prompt in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "1 2"})):
            for wanted, got in ((9, 3), (2, 2), (None, 3)):
                answer = await client.ask(path, **prompt, max_tokens=wanted, ignore_eos=True)
                assert answer["usage"]["completion_tokens"] == got
        await client.close()
