"""Prompts: questions from files, and requests that are made up with the target's help."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.train.heads import templates

FIELDS = ("messages", "turns", "prompt", "question", "instruction", "text")
KINDS = ("free", "text", "follow-up")  # sources of made-up requests
SHARES = (0.45, 0.35, 0.2)
TEXTS = (1, 1, 1, 2, 3, 4)  # of the target's texts that a request is about, drawn from these
MARK = "\u2042USER\u2042"  # stands for a user's turn while the template is taken apart


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as token ids, ready to be answered; ``source`` says where it came from."""

    tokens: tuple[int, ...]
    source: str


class Chat:
    """Renders conversations for the target; without a chat template, plain text."""

    def __init__(self, tokenizer: Tokenizer, start: int | None = None) -> None:
        """``start`` is the id that texts begin with, for targets without a template."""
        self._tokenizer, self._start = tokenizer, start
        try:
            before, _, after = tokenizer.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
            self._before, self._after, self.has_template = before, after, True
        except RequestError:
            self._before, self._after, self.has_template = "", "", False

    @property
    def user_ends(self) -> list[int]:
        """Ids of which the first one ends a user's turn."""
        return self.encode(self._after)[:1]

    def encode(self, text: str) -> list[int]:
        """Token ids; templates write the special tokens that a prompt begins with."""
        return self._tokenizer.encode(text, special_tokens=not self.has_template)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(tokens)

    def ask(self, turns: Sequence[str]) -> list[int]:
        """The prompt for a user's turn; ``turns`` are the user's and the target's by turns, the user's last."""
        if not self.has_template:
            return self.encode("\n\n".join(turns))
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        return self.encode(self._tokenizer.render_chat(messages))

    def ask_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt for a conversation in OpenAI's form."""
        if not self.has_template:
            return self.encode("\n\n".join(str(m["content"]) for m in messages))
        return self.encode(self._tokenizer.render_chat(messages))

    def opening(self, beginning: str = "") -> list[int]:
        """What a user's first turn follows, or a text; from here a target writes of its own accord.

        ``beginning`` is what the user's turn begins with, if there is a template.

        Raises:
            ConfigError: the target has no template, and no token that texts begin with.
        """
        opening = self.encode(self._before + beginning)
        if not opening and self._start is not None:
            opening = [self._start]
        if not opening:
            raise ConfigError(
                "model: got one without chat template or first token, expected --prompts or one with them"
            )
        return opening


def read_prompts(path: Path, chat: Chat) -> list[Asked]:
    """Prompts of a JSON-lines file; each line has one of ``FIELDS``, of ``turns`` the first is taken.

    Their source is the line's ``category``, else the file's name.

    Raises:
        ConfigError: the file is missing, or a line has none of them.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: got {str(path)!r}, expected a file of JSON lines ({error})") from error
    asked = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            name = next(name for name in FIELDS if name in record)
            value = record[name]
            if name == "messages":
                tokens = chat.ask_messages(value)
            else:
                tokens = chat.ask([str(value[0] if name == "turns" else value)])
        except (ValueError, StopIteration, TypeError, KeyError, IndexError, RequestError) as error:
            raise ConfigError(
                f"prompts: line {number} of {str(path)!r} cannot be used; expected an object with {' or '.join(FIELDS)}"
            ) from error
        asked.append(Asked(tuple(tokens), str(record.get("category") or path.stem)))
    return asked


class Inventor:
    """Makes up requests from templates and from texts that the target wrote before."""

    def __init__(self, chat: Chat, seed: int) -> None:
        self._chat, self._random = chat, random.Random(seed)

    def invent(self, texts: Sequence[str], count: int) -> list[Asked]:
        """``count`` requests; ``texts`` are answers of the target, and while there are none, none is asked about."""
        make = {
            "free": lambda: [self._free()],
            "text": lambda: [self._about(texts)],
            "follow-up": lambda: self._follow_up(texts),
        }
        kinds = self._random.choices(KINDS, SHARES, k=count) if texts else ["free"] * count
        return [Asked(tuple(self._chat.ask(make[kind]())), kind) for kind in kinds]

    def beginnings(self, count: int) -> list[str]:
        """What ``count`` users' turns begin with; half of them with nothing given."""
        return [self._random.choice(templates.OPENINGS) if self._random.random() < 0.5 else "" for _ in range(count)]

    def temperatures(self, count: int) -> list[float]:
        """Half greedy, the rest at 0.7 or 1."""
        return self._random.choices((0.0, 0.7, 1.0), (2, 1, 1), k=count)

    def _free(self) -> str:
        draw = self._random
        subject, other = draw.sample(templates.SUBJECTS, 2)
        persona, other_persona = draw.sample(templates.PERSONAS, 2)
        return draw.choice(templates.FREE).format(
            subject=subject,
            other=other,
            persona=persona,
            other_persona=other_persona,
            program=draw.choice(templates.PROGRAMS),
            language=draw.choice(templates.LANGUAGES),
            number=draw.randint(3, 20),
            small=draw.randint(2, 9),
            price=draw.randint(10, 400),
            percent=5 * draw.randint(1, 15),
        )

    def _about(self, texts: Sequence[str]) -> str:
        draw = self._random
        parts = [_part(draw.choice(texts), draw) for _ in range(1 + draw.choice(TEXTS))]
        second, text = parts[0], "\n".join(parts[1:])
        form = draw.choice(templates.ABOUT_A_TEXT)
        # One replacement each: the texts may have braces of their own.
        for name, value in (("{question}", draw.choice(templates.QUESTIONS)), ("{second}", second), ("{text}", text)):
            form = form.replace(name, value)
        return form

    def _follow_up(self, texts: Sequence[str]) -> list[str]:
        draw = self._random
        return [self._free(), _part(draw.choice(texts), draw), draw.choice(templates.FOLLOW_UPS)]


def _part(text: str, draw: random.Random) -> str:
    """Some paragraphs of ``text`` from its beginning, so that lengths vary."""
    paragraphs = [p for p in text.split("\n\n") if p.strip()] or [text]
    return "\n\n".join(paragraphs[: draw.randint(1, len(paragraphs))])


def long_enough(texts: Iterable[str], characters: int = 120) -> list[str]:
    """Those of ``texts`` that are worth asking about."""
    return [text for text in texts if len(text) >= characters]
