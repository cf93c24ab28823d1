from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.api import LLM
from dynaspec.api.options import EngineOptions
from dynaspec.contract.errors import ConfigError, DynaspecError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.keys import SPECULATION_OPTIONS
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.vllm_options import FOREIGN, RENAMED, SERVER_ONLY
from dynaspec.metrics import Counter, Gauge, Histogram, Vector
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
    assert (output.prompt_token_ids, output.finished, len(tokens(output))) == ([97, 98, 99], True, 6)


def test_token_ids_may_be_numpys(llm: LLM) -> None:
    [output] = llm.generate(list(np.array([97, 98, 99])), GREEDY)
    assert output.prompt_token_ids == [97, 98, 99]


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


def test_options_of_vllm_s_are_taken(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(
        "fake",
        gpu_memory_utilization=0.9,
        enforce_eager=True,
        tensor_parallel_size=1,
        swap_space=0,
        max_num_seqs=None,
        seed=None,
        kv_cache_memory_bytes=10**6,
        trust_remote_code=True,
        disable_log_stats=False,
        hf_overrides={},
        compilation_config=None,
        spec_method="ngram",
        spec_tokens=3,
    ) as llm:
        assert llm.config is built.engine.config
    assert (built.config.kv_cache_memory, built.config.trust_remote_code, built.config.seed) == (10**6, True, 0)
    assert built.config.speculative_config is not None
    assert (built.config.speculative_config.method, built.config.speculative_config.longest_draft) == ("ngram", 3)
    [warning] = caplog.records
    assert warning.message == "gpu_memory_utilization=0.9 is ignored: the KV cache's size is kv_cache_memory"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: Input should be 'auto', 'float32' or 'bfloat16' (given: 'fp8')"),
        ({"hf_overrides": {"rope_theta": 1e6}}, "a checkpoint's configuration is taken as it is"),
        ({"enable_lora": True}, "enable_lora=True is not available; expected it left out"),
        ({"tensor_parallel_size": 2}, "expected 1"),
        (
            {"kv_cache_memory": 1, "kv_cache_memory_bytes": 1},
            "kv_cache_memory_bytes and kv_cache_memory are both given",
        ),
        ({"spec_method": "ngram", "speculative_config": {"method": "ngram"}}, "one or the other"),
        ({"no_such": 1}, "unknown option 'no_such'"),
        ({"chat_template": "nowhere.jinja"}, "neither a template nor a file"),
    ],
)
def test_options_that_would_change_answers_are_refused(built: Built, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LLM("fake", **options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("half", "float16"),
        ("float", "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.half, "float16"),
        ("auto", "auto"),
    ],
)
def test_other_names_of_a_dtype(given: Any, dtype: str) -> None:
    assert EngineConfig.build(model="m", dtype=given).dtype == dtype


def test_a_dtype_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="dtype"):
        EngineConfig.build(model="m", dtype=torch.int8)


def test_arguments_of_vllm_s_that_ask_for_nothing(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    assert len(llm.generate(["a", "b"], GREEDY, lora_request=[None, None], priority=[0, 0])) == 2
    assert not caplog.records
    llm.generate("a", GREEDY, priority=1)
    assert "priority is ignored" in caplog.text
    with pytest.raises(RequestError, match="lora_request is given; expected None"):
        llm.generate("a", GREEDY, lora_request=object())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="tokenization_kwargs"):
        llm.generate("a", GREEDY, tokenization_kwargs={"truncation": True})


def test_a_bar_of_the_caller_s_own(llm: LLM) -> None:
    bars = []

    def bar(outputs: Iterator[Any], **options: Any) -> Iterator[Any]:
        bars.append(options)
        return outputs

    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=bar)) == 2
    assert bars == [{"total": 2, "desc": "prompts"}]


def test_metrics_have_vllm_s_names_and_classes(llm: LLM) -> None:
    [output] = llm.generate("abc", GREEDY)
    found = {metric.name: metric for metric in llm.get_metrics() if "finished_reason" not in metric.labels}
    assert {type(metric) for metric in found.values()} == {Counter, Gauge, Vector, Histogram}
    assert found["vllm:generation_tokens"] == Counter(
        name="vllm:generation_tokens", labels={"model_name": "fake", "engine": "0"}, value=len(tokens(output))
    )
    latency = found["vllm:e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert latency.count == latency.buckets["+Inf"] == 1
    assert isinstance(found["vllm:spec_decode_num_accepted_tokens_per_pos"], Vector)
    assert isinstance(found["vllm:num_requests_running"], Gauge)
    assert isinstance(found["vllm:iteration_tokens_total"], Histogram)


def test_the_typed_options_are_those_that_there_are() -> None:
    typed = set(EngineOptions.__annotations__)
    own = EngineConfig.model_fields.keys() - {"model", "speculative_config"}
    assert own <= typed
    assert typed - own <= FOREIGN.keys() | SERVER_ONLY.keys() | RENAMED.keys() | SPECULATION_OPTIONS.keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None,), "prompts is a NoneType; expected a prompt or a list of prompts"),
        ((5,), "prompts is a int; expected"),
        ((["a"], 5), "sampling_params is a int; expected SamplingParams or a list of them"),
        (("a", {"max_tokens": 3}), "sampling_params is a dict; expected"),
        ((["a"], [None]), "sampling_params holds a NoneType; expected SamplingParams"),
    ],
    ids=str,
)
def test_arguments_of_another_kind_are_a_sentence(arguments: Any, words: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(*arguments)


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    outputs = llm.generate((text for text in ("abc", "b")), GREEDY)  # type: ignore[arg-type]
    assert [output.prompt for output in outputs] == ["abc", "b"]


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        (5, {}, "messages is a int; expected a list of messages"),
        ("hi", {}, "messages is a str; expected"),
        ([5], {}, "a chat is a int; expected a list of messages"),
        ([{"role": "user", "content": "a"}], {"tools": "x"}, "tools holds 'x'; expected a list of objects"),
    ],
    ids=str,
)
def test_chats_of_another_kind_are_a_sentence(messages: Any, options: Any, words: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat(messages, GREEDY, **options)


@pytest.mark.parametrize("overlapped", [False, True])
def test_after_its_end_an_engine_takes_no_requests(overlapped: bool, built: Built) -> None:
    llm = LLM("fake", async_scheduling=overlapped)
    llm.generate("abc", GREEDY)
    llm.close()
    for _ in range(2):
        with pytest.raises(DynaspecError, match="the engine was closed; expected a running one"):
            llm.generate("abc", GREEDY)
    llm.close()


# --- which engine is opened; vLLM's own is run by tests/hosts/vllm ---


@pytest.mark.parametrize("name", ["vlm", "", None])
def test_a_backend_that_there_is_not(name: Any) -> None:
    with pytest.raises(ConfigError, match="expected 'dynaspec' or 'vllm'"):
        LLM("m", backend=name)


def test_without_vllm_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaspec.hosts.vllm.launch.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed; expected it to be: pip install vllm"):
        LLM("m", backend="vllm")


def test_what_vllm_cannot_carry_out_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaspec.api.llm.require_vllm", lambda: None)
    monkeypatch.setattr("dynaspec.hosts.vllm.launch.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="cannot stop between draft passes"):
        LLM("m", backend="vllm", speculative_config={"model": "d", "policy": "confidence"})
    with pytest.raises(ConfigError, match="kv_cache_memory: 'much' is not a size"):
        LLM("m", backend="vllm", kv_cache_memory="much")
