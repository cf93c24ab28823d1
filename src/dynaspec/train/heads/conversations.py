"""Conversations that the target has written, on disk, and how they are collected."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from dynaspec.api import LLM
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.tokenizer import Tokenizer

from .prompts import KINDS, Asked, Chat, Inventor, long_enough

USER_TOKENS = 128  # of a user's turn that the target makes up, at most
BEGINNING_TOKENS = 16  # of a text that a target without a chat template goes on with
POOL = 2000  # latest answers that requests are made of
OWN = "own"  # source of conversations whose user's turn the target wrote
SOURCES = (OWN, *KINDS)
OWN_SHARE = 0.4  # of the made-up conversations begin with a user's turn that the target wrote


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


class Writer(Protocol):
    """Continues prompts."""

    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], new_tokens: int, stop: Sequence[int] = ()
    ) -> list[list[int]]:
        """Up to ``new_tokens`` ids for each prompt; the id that ended it included. ``stop`` ids end it as well."""
        ...


class EngineWriter:
    """dynaspec's engine, plainly decoding many requests at once."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._seed = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], new_tokens: int, stop: Sequence[int] = ()
    ) -> list[list[int]]:
        """See :class:`Writer`; prompts that leave no room are answered with nothing."""
        fit = [i for i, prompt in enumerate(prompts) if len(prompt) + new_tokens <= self._llm.max_model_len]
        params = [
            SamplingParams(
                temperature=temperatures[i], max_tokens=new_tokens, detokenize=False, stop_token_ids=list(stop) or None
            )
            for i in fit
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        outputs = self._llm.generate([{"prompt_token_ids": list(prompts[i])} for i in fit], params) if fit else []
        for i, output in zip(fit, outputs, strict=True):
            answers[i] = list(output.outputs[0].token_ids)
        return answers


@contextmanager
def open_writer(model: str, device: torch.device, longest: int, at_once: int, seed: int) -> Iterator[EngineWriter]:
    """An engine for texts of up to ``longest`` tokens, ``at_once`` together; closed afterwards.

    Raises:
        CheckpointError, ConfigError, CapacityError: what was given cannot work.
    """
    with LLM(model, device=device.type, max_model_len=longest, max_num_seqs=at_once, seed=seed) as llm:
        yield EngineWriter(llm)


class Collector:
    """Fills ``path`` with conversations."""

    def __init__(self, path: Path, chat: Chat, writer: Writer, new_tokens: int, at_once: int, seed: int) -> None:
        """``at_once`` conversations make a round, which is what a kill may lose."""
        self._path, self._chat, self._writer = path, chat, writer
        self._new_tokens, self._round = new_tokens, at_once
        known = list(read_conversations(path)) if path.is_file() else []
        # A seed that depends on what is there: a run that goes on after a kill does not ask the same again.
        self._inventor = Inventor(chat, seed + len(known))
        self._random = random.Random(seed + len(known))
        self._asked = {c.prompt for c in known}
        self._texts = long_enough(chat.decode(c.answer) for c in known[-POOL:])
        self.made_up = sum(c.source in SOURCES for c in known)  # conversations of the target's own that are there

    def answer_prompts(self, asked: Sequence[Asked], say: Callable[[str], None]) -> int:
        """Answer those of ``asked`` that have not been; returns how many."""
        left = [a for a in asked if a.tokens not in self._asked]
        self._random.shuffle(left := list(left))
        return self._answer(iter(_batches(left, self._round)), len(left), say)

    def make_up(self, count: int, say: Callable[[str], None]) -> int:
        """``count`` conversations of the target's own; returns how many came out."""

        def rounds() -> Iterator[list[Asked]]:
            done = 0
            while done < count:
                size = min(self._round, count - done)
                own = round(OWN_SHARE * size) if self._chat.has_template else size
                yield self._own_questions(own) + self._inventor.invent(self._texts, size - own)
                done += size

        return self._answer(rounds(), count, say)

    def _answer(self, rounds: Iterator[list[Asked]], total: int, say: Callable[[str], None]) -> int:
        done = kept = 0
        for asked in rounds:
            temperatures = self._inventor.temperatures(len(asked))
            answers = self._writer.write([a.tokens for a in asked], temperatures, self._new_tokens)
            new = [
                Conversation(a.tokens, tuple(answer), a.source, temperature)
                for a, answer, temperature in zip(asked, answers, temperatures, strict=True)
                if len(answer) > 1
            ]
            append_conversations(self._path, new)
            self._asked |= {c.prompt for c in new}
            self._texts = (self._texts + long_enough(self._chat.decode(c.answer) for c in new))[-POOL:]
            done, kept = done + len(asked), kept + len(new)
            say(f"{done} of {total} conversations, {sum(len(c.answer) for c in new)} tokens in the last round")
        return kept

    def _own_questions(self, count: int) -> list[Asked]:
        """User turns that the target writes when it is given the template up to their beginning.

        Without a template, beginnings of texts for it to go on with.
        """
        if not count:
            return []
        if not self._chat.has_template:
            opening = self._chat.opening()
            turns = self._writer.write([opening] * count, [1.0] * count, BEGINNING_TOKENS)
            return [Asked((*opening, *turn), OWN) for turn in turns if len(turn) == BEGINNING_TOKENS]
        beginnings = self._inventor.beginnings(count)
        openings = [self._chat.opening(beginning) for beginning in beginnings]
        turns = self._writer.write(openings, [1.0] * count, USER_TOKENS, stop=self._chat.user_ends)
        texts = [(b + self._chat.decode(turn)).strip() for b, turn in zip(beginnings, turns, strict=True)]
        return [Asked(tuple(self._chat.ask([text])), OWN) for text in texts if text]


def _batches(asked: list[Asked], size: int) -> Iterator[list[Asked]]:
    for begin in range(0, len(asked), size):
        yield asked[begin : begin + size]
