"""``generation_config.json``: the tokens that end a text, and the sampling that a checkpoint's makers recommend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .families.common import token_ids
from .weights import read_json

FILE_NAME = "generation_config.json"

PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The file's name of a parameter → that of ``SamplingParams``. These are the ones that vLLM takes from it."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What a file says; of a checkpoint without one, nothing."""

    end_tokens: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``SamplingParams``, as the file has them: not checked."""


def read_generation_config(directory: Path) -> GenerationConfig:
    """
    Raises:
        CheckpointError: the file is there, but is not a JSON object.
    """
    path = directory / FILE_NAME
    if not path.is_file():
        return GenerationConfig()
    content = read_json(path)
    return GenerationConfig(token_ids(content.get("eos_token_id")), sampling_of(content))


def sampling_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that a generation config sets; null sets none."""
    return {ours: content[name] for name, ours in PARAMETERS.items() if content.get(name) is not None}
