"""Requests drawn from data sets."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynaspec.bench.datasets import DEMO, FORMS, BenchPrompt, load_dataset
from dynaspec.contract.errors import ConfigError

from .protocol import Prompt
from .settings import Workload
from .tokens import Tokens

RANDOM, SHAREGPT, CUSTOM = "random", "sharegpt", "custom"
NAMES = (DEMO, RANDOM, SHAREGPT, CUSTOM, *FORMS)
"""What ``--dataset-name`` may be."""
_OUTPUT_LENS: Mapping[str, int] = {RANDOM: 128, DEMO: 128}
"""Usual lengths of answers, where they are not ``_OUTPUT_LEN``."""
_OUTPUT_LEN = 256
_SHAREGPT_SHORTEST, _SHAREGPT_LONGEST_PROMPT, _SHAREGPT_LONGEST = 4, 1024, 2048
"""Tokens; conversations outside are left out, as everywhere that this data set is used."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to send."""

    prompt: Prompt
    output_len: int
    category: str = ""


async def draw_requests(workload: Workload, tokens: Tokens | None) -> list[Asked]:
    """The requests of a workload: the same for the same seed.

    Raises:
        ConfigError: an unknown data set, a file that cannot be read or is of another form, or no tokenizer for a data
            set that needs one.
    """
    name = data_set_name(workload)
    if name is not None and name not in NAMES:
        raise ConfigError(f"the data set's name is {name!r}; expected {', '.join(NAMES)}")
    if name == RANDOM:
        return await _random(workload, _needed(tokens, RANDOM))
    if name == SHAREGPT:
        return await _sharegpt(workload, tokens)
    if name == DEMO and workload.dataset_path is not None:
        raise ConfigError(
            f"the data set {DEMO!r} was given with the file {workload.dataset_path}; expected one of them"
        )
    form = "prompts" if name == CUSTOM else name
    prompts = load_dataset(None if form == DEMO else form, workload.dataset_path).prompts
    asked = [_asked(prompt, workload, name) for prompt in _of_category(prompts, workload.category)]
    return _drawn(asked, workload)


def data_set_name(workload: Workload) -> str | None:
    """The data set's name; None for a file whose lines say what they are."""
    return RANDOM if workload.dataset_name is None and workload.dataset_path is None else workload.dataset_name


def _of_category(prompts: Sequence[BenchPrompt], category: str | None) -> list[BenchPrompt]:
    chosen = [prompt for prompt in prompts if category in (None, prompt.category)]
    if not chosen:
        known = ", ".join(sorted({repr(prompt.category) for prompt in prompts}))
        raise ConfigError(f"the category is {category!r}, which no prompt has; expected one of {known}")
    return chosen


def _asked(prompt: BenchPrompt, workload: Workload, name: str | None) -> Asked:
    usual = prompt.output_tokens or _OUTPUT_LENS.get(name or "", _OUTPUT_LEN)
    return Asked(prompt.text, workload.output_len or usual, prompt.category)


def _drawn(asked: Sequence[Asked], workload: Workload) -> list[Asked]:
    """As many as wanted: shuffled, and the first again where there are too few."""
    rng = random.Random(workload.seed)
    order = list(asked)
    if workload.shuffle:
        rng.shuffle(order)
    if len(order) < workload.num_prompts and workload.oversample:
        order += rng.choices(order, k=workload.num_prompts - len(order))
    return order[: workload.num_prompts]


async def _random(workload: Workload, tokens: Tokens) -> list[Asked]:
    """Prompts of random tokens, and lengths around their means."""
    if workload.dataset_path is not None:
        raise ConfigError(f"the data set 'random' was given with the file {workload.dataset_path}; expected no file")
    rng = np.random.default_rng(workload.seed)
    vocabulary = np.array(await tokens.vocabulary())
    count, ratio = workload.num_prompts, workload.range_ratio
    prefix = rng.choice(vocabulary, workload.prefix_len).tolist()
    input_lens = _lengths(rng, workload.input_len, ratio, count)
    output_lens = _lengths(rng, workload.output_len or _OUTPUT_LENS[RANDOM], ratio, count)
    return [
        Asked((*prefix, *rng.choice(vocabulary, given).tolist()), wanted)
        for given, wanted in zip(input_lens, output_lens, strict=True)
    ]


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, int(mean * (1 - ratio))), int(np.ceil(mean * (1 + ratio)))
    return [int(length) for length in rng.integers(low, high, count, endpoint=True)]


async def _sharegpt(workload: Workload, tokens: Tokens | None) -> list[Asked]:
    """First questions of conversations, with the lengths of their answers."""
    turns = _load_sharegpt(workload.dataset_path)
    if workload.shuffle:
        random.Random(workload.seed).shuffle(turns)
    counter = _needed(tokens, SHAREGPT)
    found: list[Asked] = []
    for first in range(0, len(turns), workload.num_prompts):
        several = turns[first : first + workload.num_prompts]
        measured = await asyncio.gather(*(_measured(turn, workload.output_len, counter) for turn in several))
        found += [asked for asked in measured if asked is not None]
        if len(found) >= workload.num_prompts:
            break
    if not found:
        raise ConfigError(f"{workload.dataset_path} holds no conversation of a usable length")
    ordered = Workload(
        num_prompts=workload.num_prompts, seed=workload.seed, shuffle=False, oversample=workload.oversample
    )
    return _drawn(found, ordered)


async def _measured(turn: tuple[str, str], output_len: int | None, tokens: Tokens) -> Asked | None:
    """A conversation as a request; None if it is too short or too long."""
    question, answer = turn
    given = len(await tokens.encode(question))
    wanted = output_len if output_len is not None else len(await tokens.encode(answer))
    too_short = given < _SHAREGPT_SHORTEST or (output_len is None and wanted < _SHAREGPT_SHORTEST)
    too_long = given > _SHAREGPT_LONGEST_PROMPT or given + wanted > _SHAREGPT_LONGEST
    return None if too_short or too_long else Asked(question, wanted)


def _load_sharegpt(path: Path | None) -> list[tuple[str, str]]:
    """(question, answer) of every conversation that has both."""
    if path is None:
        raise ConfigError("the data set 'sharegpt' has no path; expected its file, see --dataset-path")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the conversations in {path} cannot be read: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON ({error.msg}); expected a list of conversations") from None
    entries = document if isinstance(document, list) else []
    turns = [pair for entry in entries if (pair := _first_turns(entry)) is not None]
    if not turns:
        raise ConfigError(f"{path} holds no conversations; expected a list of objects with 'conversations'")
    return turns


def _first_turns(entry: Any) -> tuple[str, str] | None:
    said = entry.get("conversations") if isinstance(entry, Mapping) else None
    if not isinstance(said, list) or len(said) < 2:
        return None
    values = [turn.get("value") if isinstance(turn, Mapping) else None for turn in said[:2]]
    question, answer = values
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None


def _needed(tokens: Tokens | None, name: str) -> Tokens:
    if tokens is None:
        raise ConfigError(
            f"the data set {name!r} needs a tokenizer, and the server has no /tokenize; expected --tokenizer"
        )
    return tokens
