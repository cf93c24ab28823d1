"""Conversations to train on, as token ids in JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt with the target's answer, both as token ids; ``source`` says where the prompt came from."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    source: str
    temperature: float

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt, then answer."""
        return self.prompt + self.answer

    def as_json(self) -> dict[str, Any]:
        """A line of the file."""
        return {
            "source": self.source,
            "temperature": self.temperature,
            "prompt": list(self.prompt),
            "answer": list(self.answer),
        }


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations in ``path``; a last line that was cut short is passed over.

    Raises:
        ConfigError: the file is missing, or a line is no conversation.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"conversations: got {str(path)!r}, expected a file of JSON lines ({error})") from error
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line break is unfinished or empty
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            yield Conversation(
                prompt=tuple(map(int, record["prompt"])),
                answer=tuple(map(int, record["answer"])),
                source=str(record.get("source", "")),
                temperature=float(record.get("temperature", 0.0)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"conversations: line {number} of {str(path)!r} cannot be read ({error}); "
                "expected an object with lists of token ids, prompt and answer"
            ) from error


def append_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Add lines to ``path``, all in one write; a line cut short by a kill is first removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(c.as_json(), separators=(",", ":")) + "\n" for c in conversations)
    with open(path, "ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(text.encode())
