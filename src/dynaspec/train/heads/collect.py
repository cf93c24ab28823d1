"""The data stage: rounds of prompts and answers, appended to the work folder as they come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dynaspec.train.heads.conversations import Conversation, append_conversations, read_conversations
from dynaspec.train.heads.prompts import KINDS, Asked, Chat, Inventor, long_enough
from dynaspec.train.heads.writer import Writer

USER_TOKENS = 128  # of a user's turn that the target makes up, at most
BEGINNING_TOKENS = 16  # of a text that a target without a chat template goes on with
POOL = 2000  # latest answers that requests are made of
OWN = "own"  # source of conversations whose user's turn the target wrote
SOURCES = (OWN, *KINDS)
OWN_SHARE = 0.4  # of the made-up conversations begin with a user's turn that the target wrote


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
