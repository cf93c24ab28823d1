"""How ``generate`` writes what was decoded: results only, the same bytes however it was decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol, TextIO

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.outputs import RequestOutput


class Writer(Protocol):
    """Takes outputs as they grow, in any order of the prompts."""

    def update(self, index: int, output: RequestOutput) -> None:
        """The output of prompt ``index`` so far, cumulative."""
        ...


class StreamedText:
    """One continuation of one prompt, written as it appears, and a newline."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._shown = 0

    def update(self, index: int, output: RequestOutput) -> None:
        text = output.outputs[0].text
        self._file.write(text[self._shown :] + "\n" * output.finished)
        self._file.flush()
        self._shown = len(text)


class InOrder:
    """Writes each prompt's finished output as soon as those before it are written."""

    def __init__(self, file: TextIO, render: Callable[[int, RequestOutput], str]) -> None:
        self._file = file
        self._render = render
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0

    def update(self, index: int, output: RequestOutput) -> None:
        if output.finished:
            self._waiting[index] = output
        while self._next in self._waiting:
            self._file.write(self._render(self._next, self._waiting.pop(self._next)))
            self._next += 1
        self._file.flush()


def make_writer(kind: str, file: TextIO, prompts: int, continuations: int) -> Writer:
    """The writer for ``--output``.

    Raises:
        ConfigError: an unknown kind.
    """
    if kind == "jsonl":
        return InOrder(file, as_json_line)
    if kind == "text":
        return StreamedText(file) if prompts == continuations == 1 else InOrder(file, as_text)
    raise ConfigError(f"--output is {kind!r}; expected text or jsonl")


def as_text(index: int, output: RequestOutput) -> str:
    """Continuations under headings that count prompts and continuations from 1."""
    several = len(output.outputs) > 1
    return "".join(
        f"==> {index + 1}{f'.{completion.index + 1}' if several else ''} <==\n{completion.text}\n"
        for completion in output.outputs
    )


def as_json_line(index: int, output: RequestOutput) -> str:
    """One object: nothing in it depends on how it was decoded, so that two runs can be compared."""
    record = {
        "index": index,
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": [
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
    }
    return json.dumps(record, ensure_ascii=False) + "\n"
