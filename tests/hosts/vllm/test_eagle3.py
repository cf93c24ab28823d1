"""The committed head under vLLM's own EAGLE-3 drafter, and under dynaspec's scheduler there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

import dynaspec
from dynaspec.cli.demo import demo_target
from dynaspec.model.gguf.transformers import transformers_model
from hosts.vllm.engines import SCHEDULER

HEAD = Path(__file__).resolve().parents[3] / "models" / "smollm2-eagle3"
DRAFTS, LONGEST = 5, 256
QUESTIONS = (
    "What is the capital of Norway?",
    "Write a short story about a lighthouse keeper.",
    "Tom has 12 apples, gives 5 to Anna and buys 7 more. How many apples does he have now?",
    "Write a Python function that reverses a string.",
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = dynaspec.LLM(demo_target(), max_model_len=LONGEST).tokenizer
    chats = (tokenizer.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS)
    return [tokenizer.encode(chat, special_tokens=False) for chat in chats]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration's model as a folder."""
    folder = tmp_path_factory.mktemp("model")
    transformers_model(Path(demo_target()), torch.bfloat16).save_pretrained(folder)
    return folder


def generate(model: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """vLLM's greedy tokens, and its counters."""
    llm = LLM(
        str(model),
        dtype="float32",
        max_model_len=LONGEST,
        max_num_seqs=8,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs], counters


@pytest.fixture(scope="module")
def plain(model: Path, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    return generate(model, prompts)[0]


def test_it_drafts_there_what_it_drafts_here(model: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    drafter = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": DRAFTS}
    tokens, theirs = generate(model, prompts, speculative_config=drafter)
    assert tokens == plain

    llm = dynaspec.LLM(
        demo_target(),
        speculative_config=drafter | {"policy": "constant", "prompt_lookup_max": 0},
        max_model_len=LONGEST,
        max_num_seqs=8,
        enable_prefix_caching=False,
    )
    params = dynaspec.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    ours = llm.stats()
    # Each takes as many steps, though dynaspec drafts no more than there is room for at the end of a request.
    assert ours.request_steps == theirs["vllm:spec_decode_num_drafts"]
    assert ours.accepted > 0.2 * ours.draft_tokens


def test_dynaspec_decides_how_much_it_drafts(model: Path, prompts: list[list[int]], plain: list[list[int]]) -> None:
    drafter = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": DRAFTS}
    tokens, counters = generate(model, prompts, speculative_config=drafter, scheduler_cls=SCHEDULER)
    assert tokens == plain
    assert counters["vllm:spec_decode_num_drafts"] > 0
