"""Requests of all kinds: long and short, with structured output, up to the model's end, with wishes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from hosts.vllm.engines import MAX_MODEL_LEN

COUNT = 64
Outputs = list[tuple[int, ...]]

_TEXTS = (
    "def area(radius):",
    "def read_lines(path):\n    lines = []\n    for line in open(path):",
    "import os\nimport sys\n\ndef main(argv):",
    "Question: Tom has 3 boxes with 4 apples each. How many apples does he have?\nAnswer:",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["one", "two"]}, "ready": {"type": "boolean"}},
    "required": ["name", "ready"],
    "additionalProperties": False,
}


def mixed(tokenizer: Any, count: int = COUNT) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts and parameters, all greedy."""
    prompts: list[Any] = []
    params: list[SamplingParams] = []
    for i in range(count):
        ids = tokenizer.encode(f"# {i}\n" + _TEXTS[i % len(_TEXTS)])
        kind = i % 8
        if kind == 5:
            ids = (ids * 40)[: MAX_MODEL_LEN - 40]  # ends where the model does
        prompts.append({"prompt_token_ids": ids})
        params.append(_params(kind, i))
    return prompts, params


def _params(kind: int, i: int) -> SamplingParams:
    if kind == 3:
        return SamplingParams(temperature=0.0, max_tokens=48, structured_outputs=StructuredOutputsParams(json=_SCHEMA))
    if kind == 4:
        return SamplingParams(
            temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(ab|cd){4,8}x")
        )
    if kind == 5:
        return SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    if kind == 6:
        return SamplingParams(
            temperature=0.0, max_tokens=24, extra_args={"dynaspec": {"num_speculative_tokens": i % 3}}
        )
    if kind == 7:
        return SamplingParams(temperature=0.0, max_tokens=40, stop=["return", "\n\n"])
    return SamplingParams(temperature=0.0, max_tokens=10 + 5 * (i % 7), ignore_eos=kind < 2)


def tokens_of(outputs: Sequence[Any]) -> Outputs:
    return [tuple(output.outputs[0].token_ids) for output in outputs]
