"""What cannot be served is refused in a sentence: what was given, what is expected. Nothing else suffers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dynaspec import LLM, SamplingParams
from dynaspec.contract.errors import CapacityError, CheckpointError, ConfigError, DynaspecError, RequestError
from dynaspec.engine.intake import Prompt
from support.checkpoints import FAMILIES, MAX_POSITION, VOCAB, Pair, random_model, save
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.workloads import MODES, PROMPTS

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def damaged(tiny: Pair, folder: Path, damage: Callable[[Path], None]) -> str:
    """A copy of the target, changed."""
    shutil.copytree(tiny.target, folder)
    damage(folder)
    return str(folder)


def set_config(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no_config": remove("config.json"),
    "config_not_json": write("config.json", b"{"),
    "config_a_list": write("config.json", b"[]"),
    "config_without_a_size": set_config(hidden_size=None),
    "config_of_another_size": set_config(hidden_size=64),
    "config_of_another_vocabulary": set_config(vocab_size=VOCAB + 8),
    "config_without_architecture": set_config(architectures=[]),
    "no_weights": remove("model.safetensors"),
    "weights_cut": cut_weights,
    "weights_empty": write("model.safetensors", b""),
    "weights_garbage": write("model.safetensors", bytes(range(256)) * 8),
    "weights_incomplete": drop_a_tensor,
    "no_tokenizer": remove("tokenizer.json"),
    "tokenizer_garbage": write("tokenizer.json", b"garbage"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named(kind: str, tiny: Pair, tmp_path: Path) -> None:
    folder = damaged(tiny, tmp_path / "model", DAMAGES[kind])
    with pytest.raises(CheckpointError, match=r".{20,}"):
        LLM(folder)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_a_damaged_drafter_is_named(tiny: Pair, tmp_path: Path) -> None:
    drafter = damaged(tiny, tmp_path / "model", cut_weights)
    with pytest.raises(CheckpointError, match="model"):
        LLM(tiny.target, speculative_config={"model": drafter})


def test_a_drafter_with_another_vocabulary_is_refused(tiny: Pair, tmp_path: Path) -> None:
    name, options = FAMILIES["llama"]
    save(random_model(name, options | {"vocab_size": VOCAB + 16}, seed=5), tmp_path)
    with pytest.raises(ConfigError, match=rf"{VOCAB + 16} tokens .*{VOCAB}; expected"):
        LLM(tiny.target, speculative_config={"model": str(tmp_path)})


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "unknown_option": ({"max_num_sequences": 4}, "max_num_sequences.*expected"),
    "model_len_beyond_positions": ({"max_model_len": MAX_POSITION + 1}, f"{MAX_POSITION + 1}.*{MAX_POSITION}"),
    "model_len_zero": ({"max_model_len": 0}, "max_model_len"),
    "no_requests": ({"max_num_seqs": 0}, "max_num_seqs"),
    "fewer_rows_than_requests": ({"max_num_seqs": 32, "max_num_batched_tokens": 16}, "16.*32.*expected"),
    "negative_memory": ({"kv_cache_memory": -5}, "kv_cache_memory.*-5"),
    "memory_not_a_size": ({"kv_cache_memory": "lots"}, "lots.*expected"),
    "dtype": ({"dtype": "int3"}, "dtype.*int3"),
    "device": ({"device": "abacus"}, "device.*abacus"),
    "two_gpus": ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2.*expected"),
    "backend": ({"backend": "abacus"}, "abacus.*expected"),
    "seed": ({"seed": -1}, "seed"),
    "speculation_not_a_mapping": ({"speculative_config": 5}, "5.*expected"),
    "speculation_not_json": ({"speculative_config": "{"}, "JSON"),
    "speculation_by_nobody": ({"speculative_config": {"num_speculative_tokens": 3}}, "expected"),
    "no_drafts": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "0; expected"),
    "unknown_key": ({"speculative_config": {"method": "ngram", "num_tokens": 3}}, "num_tokens"),
    "threshold": (
        {"speculative_config": {"model": "x", "draft_confidence_threshold": 1.5}},
        "draft_confidence_threshold is 1.5; expected",
    ),
    "lookup_bounds": (
        {"speculative_config": {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}},
        "4 .*2; expected",
    ),
    "confidence_of_ngram": (
        {"speculative_config": {"method": "ngram", "draft_confidence_threshold": 0.4}},
        "ngram.*expected",
    ),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_an_impossible_configuration_is_refused(kind: str, tiny: Pair) -> None:
    options, sentence = IMPOSSIBLE[kind]
    with pytest.raises(ConfigError, match=sentence):
        LLM(tiny.target, **options)


def test_memory_for_no_block_at_all_is_refused(tiny: Pair) -> None:
    with pytest.raises(CapacityError, match=r"1000 bytes.*expected"):
        LLM(tiny.target, kv_cache_memory=1000)


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ("", "empty; expected"),
    "no_tokens": ({"prompt_token_ids": []}, "empty; expected"),
    "too_long": ({"prompt_token_ids": [5] * 64}, "64 tokens .*64.*expected at most 63"),
    "surrogate": ("broken \ud800 text", "Unicode"),
    "token_beyond": ({"prompt_token_ids": [5, VOCAB]}, f"{VOCAB}; expected ids from 0 to {VOCAB - 1}"),
    "token_negative": ({"prompt_token_ids": [5, -1]}, "-1; expected"),
    "token_fractional": ({"prompt_token_ids": [5, 1.5]}, "expected"),
    "token_true": ({"prompt_token_ids": [5, True]}, "expected"),
    "number": ({"prompt": 17}, "int; expected"),
    "bytes": ({"prompt": b"text"}, "bytes; expected"),
    "both_forms": ({"prompt": "a", "prompt_token_ids": [1]}, "expected"),
    "no_form": ({"text": "a"}, "text.*expected"),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_starts_nothing(kind: str, tiny: Pair, plain: PlainDecoding) -> None:
    prompt, sentence = BAD_PROMPTS[kind]
    with open_llm(tiny.target, max_model_len=64, max_num_seqs=2) as llm:
        with pytest.raises(RequestError, match=sentence):
            llm.generate([PROMPTS[0], prompt], GREEDY)
        assert_same(llm.generate([PROMPTS[0]], GREEDY), plain.outputs([PROMPTS[0]], [GREEDY]))
        assert llm.stats().prefill_rows == len(llm.tokenizer.encode(PROMPTS[0]))  # of the good run alone


BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown_allowed_token": ({"allowed_token_ids": [VOCAB]}, f"{VOCAB}; expected"),
    "unknown_biased_token": ({"logit_bias": {VOCAB: 1.0}}, f"{VOCAB}; expected"),
    "everything_forbidden": ({"allowed_token_ids": [0], "min_tokens": 2, "max_tokens": 4}, "expected"),
    "too_many_logprobs": ({"logprobs": VOCAB + 1}, f"{VOCAB + 1} .*{VOCAB} tokens; expected"),
    "bad_word_surrogate": ({"bad_words": ["\ud800"]}, "Unicode"),
}


@pytest.mark.parametrize("kind", BAD_PARAMS)
def test_parameters_the_model_cannot_serve_are_refused(kind: str, tiny: Pair) -> None:
    values, sentence = BAD_PARAMS[kind]
    with (
        open_llm(tiny.target, max_num_seqs=2) as llm,
        pytest.raises(RequestError, match=sentence),
    ):
        llm.generate([PROMPTS[0]], SamplingParams(**values))


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "min_above_max": {"min_tokens": 9, "max_tokens": 3},
    "stop_without_text": {"stop": "x", "detokenize": False},
    "several_greedy": {"n": 3, "temperature": 0.0},
    "negative_temperature": {"temperature": -0.1},
    "temperature_nan": {"temperature": float("nan")},
    "top_p": {"top_p": 1.2},
    "no_tokens": {"max_tokens": 0},
    "empty_stop": {"stop": [""]},
    "nothing_allowed": {"allowed_token_ids": []},
    "bias_too_large": {"logit_bias": {3: 500.0}},
    "draft_length": {"max_draft_tokens": -1},
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradictory_parameters_are_refused(kind: str) -> None:
    with pytest.raises(RequestError, match="expected"):
        SamplingParams(**CONTRADICTIONS[kind])


def test_a_request_larger_than_the_cache_is_refused_and_others_run(tiny: Pair, plain: PlainDecoding) -> None:
    with open_llm(tiny.target, kv_cache_memory=kv_bytes(4, tiny.target), max_num_seqs=4) as llm:
        with pytest.raises(RequestError, match=r"holds 64; expected"):
            llm.generate(["x"], SamplingParams(max_tokens=100))
        assert_same(llm.generate(["x"], GREEDY), plain.outputs(["x"], [GREEDY]))


def test_as_many_parameters_as_prompts(tiny: Pair) -> None:
    with open_llm(tiny.target, max_num_seqs=2) as llm, pytest.raises(RequestError, match=r"2 .*3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user"}], [{"content": "hi"}], ["hi"], [{"role": "user", "content": "\ud800"}]]
)
def test_a_bad_chat_is_refused(messages: list[Any], tiny: Pair) -> None:
    with open_llm(tiny.target, max_num_seqs=2) as llm, pytest.raises(RequestError):
        llm.chat(messages, GREEDY)


def test_an_interrupted_call_leaves_nothing_behind(tiny: Pair, plain: PlainDecoding) -> None:
    """An exception from ``on_output`` (Ctrl-C, say) ends the call's requests."""
    params = [MODES["greedy"](i) for i in range(3)]

    def interrupt(index: int, output: object) -> None:
        raise KeyboardInterrupt

    for async_scheduling in (False, True):
        with open_llm(tiny.target, max_num_seqs=2, async_scheduling=async_scheduling) as llm:
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS[:3], params, on_output=interrupt)
            llm.verify_integrity()
            assert_same(llm.generate(PROMPTS[:3], params), plain.outputs(PROMPTS[:3], params))


def test_every_refusal_is_one_kind_of_error() -> None:
    for kind in (CapacityError, CheckpointError, ConfigError, RequestError):
        assert issubclass(kind, DynaspecError)


@pytest.mark.parametrize("prompt", [[3, 4, 5], {"prompt_token_ids": (3, 4, 5)}, "text", {"prompt": "text"}])
def test_every_form_of_a_prompt_is_taken(prompt: Prompt, tiny: Pair) -> None:
    with open_llm(tiny.target, max_num_seqs=2) as llm:
        (output,) = llm.generate(prompt, GREEDY)
        assert output.finished
