"""The requests of a load test: drawn from data sets, counted in tokens, cut to what the server has room for."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dynaspec.bench.datasets import DEMO, FORMS, BenchPrompt, demo_prompts, load_dataset
from dynaspec.contract.errors import ConfigError
from dynaspec.engine.tokenizer import Tokenizer

from .client import Prompt
from .server import LoadWorkload, Server, ServerError

_QUESTIONS_AT_ONCE = 16
RANDOM, SHAREGPT, CUSTOM = "random", "sharegpt", "custom"
NAMES = (DEMO, RANDOM, SHAREGPT, CUSTOM, *FORMS)
"""What ``--dataset-name`` may be."""
_OUTPUT_LENS: Mapping[str, int] = {RANDOM: 128, DEMO: 128}
"""Usual lengths of answers, where they are not ``_OUTPUT_LEN``."""
_OUTPUT_LEN = 256
_SHAREGPT_SHORTEST, _SHAREGPT_LONGEST_PROMPT, _SHAREGPT_LONGEST = 4, 1024, 2048
"""Tokens; conversations outside are left out, as everywhere that this data set is used."""
_CHAT_ROOM = 64
"""Tokens left for what a chat template adds, and for text that becomes a few more tokens once it is cut."""


class Tokens(Protocol):
    """Text to tokens and back."""

    async def encode(self, text: str) -> list[int]: ...

    async def decode(self, ids: Sequence[int]) -> str: ...

    async def vocabulary(self) -> list[int]:
        """Tokens that random prompts may consist of, in ascending order."""
        ...


class LocalTokens:
    """A checkpoint's tokenizer."""

    def __init__(self, name_or_path: str) -> None:
        """
        Raises:
            CheckpointError: there is no such tokenizer.
        """
        self._tokenizer = Tokenizer(name_or_path)

    async def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    async def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def count(self, text: str) -> int:
        """Tokens of a text that was generated."""
        return len(self._tokenizer.encode(text, special_tokens=False))

    async def vocabulary(self) -> list[int]:
        """All tokens but those without text, such as special ones."""
        return [i for i in range(self._tokenizer.vocab_size) if self._tokenizer.decode([i])]


class ServerTokens:
    """The server's ``/tokenize`` and ``/detokenize``, as vLLM has them too."""

    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self._model = model
        self._places = asyncio.Semaphore(_QUESTIONS_AT_ONCE)

    async def works(self) -> bool:
        """Whether the server has them."""
        return isinstance(await self._ask("/tokenize", {"prompt": "a"}, "tokens"), list)

    async def encode(self, text: str) -> list[int]:
        """
        Raises:
            ServerError: the server refuses.
        """
        return await self._encode({"prompt": text})

    async def decode(self, ids: Sequence[int]) -> str:
        """
        Raises:
            ServerError: the server refuses.
        """
        return str(self._expected(await self._ask("/detokenize", {"tokens": list(ids)}, "prompt"), str, "/detokenize"))

    async def vocabulary(self) -> list[int]:
        """The tokens of the demonstration's prompts: a server does not say which of its others have text."""
        asked = [{"prompt": prompt.text, "add_special_tokens": False} for prompt in demo_prompts()]
        encoded = await asyncio.gather(*map(self._encode, asked))
        return sorted({token for tokens in encoded for token in tokens})

    async def _encode(self, body: dict[str, Any]) -> list[int]:
        return list(self._expected(await self._ask("/tokenize", body, "tokens"), list, "/tokenize"))

    async def _ask(self, path: str, body: dict[str, Any], key: str) -> Any:
        async with self._places:
            answer = await self._server.post(path, {"model": self._model, **body})
        return answer.get(key) if isinstance(answer, dict) else None

    def _expected(self, value: Any, kind: type, path: str) -> Any:
        if not isinstance(value, kind):
            raise ServerError(f"{self._server.target.root}{path} gave no answer of vLLM's form; expected --tokenizer")
        return value


async def find_tokens(server: Server, model: str, tokenizer: str | None) -> Tokens | None:
    """The tokenizer that was named; else the server's; None if it has none to ask."""
    if tokenizer is not None:
        return LocalTokens(tokenizer)
    ours = ServerTokens(server, model)
    return ours if await ours.works() else None


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request to send."""

    prompt: Prompt
    output_len: int
    category: str = ""


async def draw_requests(workload: LoadWorkload, tokens: Tokens | None) -> list[RequestSpec]:
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


def data_set_name(workload: LoadWorkload) -> str | None:
    """The data set's name; None for a file whose lines say what they are."""
    return RANDOM if workload.dataset_name is None and workload.dataset_path is None else workload.dataset_name


def _of_category(prompts: Sequence[BenchPrompt], category: str | None) -> list[BenchPrompt]:
    chosen = [prompt for prompt in prompts if category in (None, prompt.category)]
    if not chosen:
        known = ", ".join(sorted({repr(prompt.category) for prompt in prompts}))
        raise ConfigError(f"the category is {category!r}, which no prompt has; expected one of {known}")
    return chosen


def _asked(prompt: BenchPrompt, workload: LoadWorkload, name: str | None) -> RequestSpec:
    usual = prompt.output_tokens or _OUTPUT_LENS.get(name or "", _OUTPUT_LEN)
    return RequestSpec(prompt.text, workload.output_len or usual, prompt.category)


def _drawn(asked: Sequence[RequestSpec], workload: LoadWorkload) -> list[RequestSpec]:
    """As many as wanted: shuffled, and the first again where there are too few."""
    rng = random.Random(workload.seed)
    order = list(asked)
    if workload.shuffle:
        rng.shuffle(order)
    if len(order) < workload.num_prompts and workload.oversample:
        order += rng.choices(order, k=workload.num_prompts - len(order))
    return order[: workload.num_prompts]


async def _random(workload: LoadWorkload, tokens: Tokens) -> list[RequestSpec]:
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
        RequestSpec((*prefix, *rng.choice(vocabulary, given).tolist()), wanted)
        for given, wanted in zip(input_lens, output_lens, strict=True)
    ]


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, int(mean * (1 - ratio))), int(np.ceil(mean * (1 + ratio)))
    return [int(length) for length in rng.integers(low, high, count, endpoint=True)]


async def _sharegpt(workload: LoadWorkload, tokens: Tokens | None) -> list[RequestSpec]:
    """First questions of conversations, with the lengths of their answers."""
    turns = _load_sharegpt(workload.dataset_path)
    if workload.shuffle:
        random.Random(workload.seed).shuffle(turns)
    counter = _needed(tokens, SHAREGPT)
    found: list[RequestSpec] = []
    for first in range(0, len(turns), workload.num_prompts):
        several = turns[first : first + workload.num_prompts]
        measured = await asyncio.gather(*(_measured(turn, workload.output_len, counter) for turn in several))
        found += [asked for asked in measured if asked is not None]
        if len(found) >= workload.num_prompts:
            break
    if not found:
        raise ConfigError(f"{workload.dataset_path} holds no conversation of a usable length")
    return _drawn(found, replace(workload, shuffle=False))


async def _measured(turn: tuple[str, str], output_len: int | None, tokens: Tokens) -> RequestSpec | None:
    """A conversation as a request; None if it is too short or too long."""
    question, answer = turn
    given = len(await tokens.encode(question))
    wanted = output_len if output_len is not None else len(await tokens.encode(answer))
    too_short = given < _SHAREGPT_SHORTEST or (output_len is None and wanted < _SHAREGPT_SHORTEST)
    too_long = given > _SHAREGPT_LONGEST_PROMPT or given + wanted > _SHAREGPT_LONGEST
    return None if too_short or too_long else RequestSpec(question, wanted)


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


@dataclass(frozen=True, slots=True)
class Fitted:
    """Requests that the server can take."""

    requests: tuple[RequestSpec, ...]
    cut: int = 0
    """How many prompts lost their beginning."""
    unchecked: bool = False
    """Their lengths are unknown: there is no tokenizer, or the server does not say what it has room for."""


async def fit_requests(
    requests: Sequence[RequestSpec], tokens: Tokens | None, max_model_len: int | None, *, is_chat: bool
) -> Fitted:
    """Cuts prompts that leave too little room for their answers, from the left; a chat's prompts become text.

    Raises:
        ConfigError: an answer alone is as long as the model.
        ServerError: the server's tokenizer refuses.
    """
    if tokens is None:
        return Fitted(tuple(requests), unchecked=True)
    encoded = await _encoded(requests, tokens) if max_model_len is not None else {}
    fitted = []
    cut = 0
    for asked in requests:
        ids = asked.prompt if isinstance(asked.prompt, tuple) else encoded.get(asked.prompt, ())
        room = _room(max_model_len, asked.output_len, is_chat)
        prompt: Prompt = asked.prompt
        if room is not None and len(ids) > room:
            prompt = ids[-room:]
            cut += 1
        if is_chat and isinstance(prompt, tuple):
            prompt = await tokens.decode(prompt)
        fitted.append(replace(asked, prompt=prompt))
    return Fitted(tuple(fitted), cut, unchecked=max_model_len is None)


async def _encoded(requests: Sequence[RequestSpec], tokens: Tokens) -> dict[str, tuple[int, ...]]:
    """Tokens of every text, each encoded once."""
    texts = sorted({asked.prompt for asked in requests if isinstance(asked.prompt, str)})
    several = await asyncio.gather(*(tokens.encode(text) for text in texts))
    return {text: tuple(ids) for text, ids in zip(texts, several, strict=True)}


def _room(max_model_len: int | None, output_len: int, is_chat: bool) -> int | None:
    if max_model_len is None:
        return None
    room = max_model_len - output_len - (_CHAT_ROOM if is_chat else 0)
    if room < 1:
        raise ConfigError(
            f"answers of {output_len} tokens leave no room for a prompt in the model's {max_model_len}; "
            "expected a shorter --output-len"
        )
    return room
