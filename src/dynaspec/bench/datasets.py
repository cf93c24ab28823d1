"""Prompts from files: Spec-Bench, GSM8K, JSON lines with prompts, plain lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from dynaspec.contract.errors import ConfigError
from dynaspec.engine.tokenizer import Tokenizer

T = TypeVar("T")
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DEMO = "demo"
"""Name of the prompts that come with the package."""
EDITS = "edits"
"""Name of requests that change a little about few documents, over and over."""
FORMS: Mapping[str, str] = {"spec_bench": "turns", "gsm8k": "question", "prompts": "prompt"}
"""Names of forms of JSON lines, and the key that each line then has."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt and the kind of work it stands for."""

    text: str
    category: str = ""
    output_tokens: int | None = None
    """How long its answer should be; None if the file does not say."""


@dataclass(frozen=True, slots=True)
class FittedPrompts:
    """Prompts as token ids, none of them longer than the model has room for."""

    token_ids: tuple[tuple[int, ...], ...]
    cut: int
    """How many were cut, from the left."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts under a name."""

    label: str
    """A file's name without its suffix, or ``demo``."""
    prompts: tuple[BenchPrompt, ...]


def load_dataset(name: str | None, path: Path | None) -> Dataset:
    """The data set that a command line names: ``demo``, ``edits``, or a file, whose form the name may fix.

    Raises:
        ConfigError: an unknown name, a name without its file, or a file that is not of the named form.
    """
    if path is None:
        name = name or DEMO
        if name not in _OWN:
            known = " or ".join(map(repr, _OWN))
            raise ConfigError(f"the data set {name!r} has no path; expected its file, or the data set {known}")
        return Dataset(name, tuple(_OWN[name]()))
    if name is not None and name not in FORMS:
        raise ConfigError(f"the data set's name is {name!r}; expected {', '.join(FORMS)}, or only a path")
    return Dataset(path.stem, tuple(load_prompts(path, None if name is None else FORMS[name])))


def named_or_file(what: Path) -> Dataset:
    """A file's prompts, or those of a data set that comes with the package, by its name if there is no such file.

    Raises:
        ConfigError: see ``load_dataset``.
    """
    own = str(what) in _OWN and not what.exists()
    return load_dataset(str(what), None) if own else load_dataset(None, what)


def demo_prompts() -> list[BenchPrompt]:
    """The prompts that come with the package: code to complete, code to edit, maths."""
    text = (resources.files(__package__) / "prompts.json").read_text(encoding="utf-8")
    return [BenchPrompt(record["prompt"], record["kind"]) for record in json.loads(text)["prompts"]]


def edit_prompts() -> list[BenchPrompt]:
    """24 users' turns: four functions in turns, in each of which a variable is to get another name every time."""
    told = json.loads((resources.files(__package__) / "edits.json").read_text(encoding="utf-8"))
    return [
        BenchPrompt(
            f"Rename the variable `{document['variable']}` to `{name}` in this code. Repeat the whole code.\n\n"
            f"```python\n{document['code']}\n```",
            EDITS,
        )
        for name in told["names"]
        for document in told["documents"]
    ]


_OWN: Mapping[str, Callable[[], list[BenchPrompt]]] = {DEMO: demo_prompts, EDITS: edit_prompts}
"""Data sets that come with the package."""


def load_prompts(path: str | Path, key: str | None = None) -> list[BenchPrompt]:
    """Every prompt of a file, in its order.

    A ``.jsonl`` file has one object a line, with ``prompt`` (text), ``turns`` (Spec-Bench: the first turn counts) or
    ``question`` (GSM8K: rendered as a question to answer), and perhaps ``category`` and ``output_tokens``. Any other
    file has one prompt a line; empty lines do not count.

    Args:
        key: what every line must have its text under, in a JSON file; None = any of the three.

    Raises:
        ConfigError: the file cannot be read, holds no prompts, or a line is not of a known form.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts in {path} cannot be read: {error}") from None
    if path.suffix.lower() in _JSON_SUFFIXES or key is not None:
        prompts = [_from_json(line, f"{path}:{n}", key) for n, line in enumerate(lines, start=1) if line.strip()]
    else:
        prompts = [BenchPrompt(line) for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; expected at least one line")
    return prompts


def spread(prompts: Sequence[T], count: int) -> list[T]:
    """``count`` prompts at even distances (all, if there are no more), so that every part of the file is heard."""
    if count >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // count] for i in range(count)]


def fit(
    prompts: Sequence[BenchPrompt], tokenizer: Tokenizer, max_prompt_tokens: int, *, chat: bool = False
) -> FittedPrompts:
    """Token ids of the prompts; of one that is too long, the last ``max_prompt_tokens``.

    Args:
        chat: each is a user's turn, rendered by the chat template.

    Raises:
        RequestError: there is no chat template.
        ConfigError: no room for any prompt.
    """
    if max_prompt_tokens < 1:
        raise ConfigError("max_tokens leaves no room for a prompt; expected fewer than the model's length")
    texts = [prompt.text for prompt in prompts]
    if chat:
        texts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    encoded = [tokenizer.encode(text, special_tokens=not chat) for text in texts]
    return FittedPrompts(
        token_ids=tuple(tuple(tokens[-max_prompt_tokens:]) for tokens in encoded),
        cut=sum(len(tokens) > max_prompt_tokens for tokens in encoded),
    )


def _from_json(line: str, where: str, key: str | None) -> BenchPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error.msg}); expected one object a line") from None
    text = _text(record, key) if isinstance(record, Mapping) else None
    if text is None:
        raise ConfigError(f"{where} has no text; expected an object with {key or 'prompt, turns or question'}")
    output_tokens = record.get("output_tokens")
    if not (output_tokens is None or (isinstance(output_tokens, int) and output_tokens > 0)):
        raise ConfigError(f"{where} has output_tokens {output_tokens!r}; expected a whole number above 0")
    return BenchPrompt(text, str(record.get("category", "")), output_tokens)


def _text(record: Mapping[str, Any], key: str | None) -> str | None:
    if key is not None:
        record = {key: record.get(key)}
    turns = record.get("turns")
    question = record.get("question")
    if isinstance(question, str) and question:
        text: Any = f"Question: {question}\nAnswer:"
    elif isinstance(turns, list) and turns:
        text = turns[0]
    else:
        text = record.get("prompt")
    return text if isinstance(text, str) and text else None
