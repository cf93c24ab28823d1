"""Conversations to train on: written by the target, cut short and gone on with, read back."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.train.heads.conversations import (
    BEGINNING_TOKENS,
    Collector,
    Conversation,
    append_conversations,
    read_conversations,
)
from dynaspec.train.heads.prompts import Chat, Inventor, read_prompts
from dynaspec.train.heads.states import held_out_indices, plan_shards


def conversation(i: int, temperature: float = 0.0, answer: int = 3) -> Conversation:
    return Conversation((i, i + 1), tuple(range(answer)), "own", temperature)


def test_a_line_cut_short_by_a_kill_is_passed_over_and_then_replaced(tmp_path) -> None:
    path = tmp_path / "c.jsonl"
    append_conversations(path, [conversation(0), conversation(1)])
    with open(path, "a") as file:
        file.write('{"prompt": [1, 2], "answ')
    assert list(read_conversations(path)) == [conversation(0), conversation(1)]
    append_conversations(path, [conversation(2)])
    assert list(read_conversations(path)) == [conversation(i) for i in range(3)]


def test_what_is_no_conversation_is_named(tmp_path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": [1]}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .* expected an object with lists of token ids"):
        list(read_conversations(path))
    with pytest.raises(ConfigError, match="expected a file of JSON lines"):
        list(read_conversations(tmp_path / "none"))


def test_greedy_answers_are_held_out_where_there_are_enough() -> None:
    mixed = [conversation(i, temperature=i % 2) for i in range(40)]
    chosen = held_out_indices(mixed, 5, longest=100)
    assert len(chosen) == 5
    assert all(mixed[i].temperature == 0.0 for i in chosen)
    few = [conversation(i, temperature=1.0) for i in range(8)]
    assert len(held_out_indices(few, 5, longest=100)) == 2  # never more than a quarter
    assert held_out_indices([conversation(0, answer=1)], 5, longest=100) == []


def test_shards_go_on_where_the_last_one_ended() -> None:
    jobs = plan_shards(through=10, total=24, first=3, size=8)
    assert [(j.number, j.begin, j.end) for j in jobs] == [(3, 10, 18), (4, 18, 24)]
    assert plan_shards(24, 24, 5) == []


class Letters:
    """A tokenizer of single characters, with a chat template of one line a turn if ``template``."""

    def __init__(self, template: bool = True) -> None:
        self._template = template

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, tokens))

    def render_chat(self, messages) -> str:
        if not self._template:
            raise RequestError("no template")
        return "".join(f"<{m['role']}>{m['content']}|" for m in messages) + "<assistant>"


class Echo:
    """Answers with ``text``, whatever is asked, and remembers what was."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.asked: list[str] = []
        self.stops: list[Sequence[int]] = []

    def write(self, prompts, temperatures, new_tokens, stop=()) -> list[list[int]]:
        self.asked += ["".join(map(chr, prompt)) for prompt in prompts]
        self.stops.append(stop)
        return [[ord(c) for c in self._text[:new_tokens]] for _ in prompts]


def collect(path, writer, template=True, start=None) -> Collector:
    return Collector(path, Chat(Letters(template), start), writer, new_tokens=200, at_once=8, seed=1)


def test_a_chat_model_writes_its_users_turns_and_is_asked_about_its_own_texts(tmp_path) -> None:
    writer = Echo("a long enough text. " * 10)
    collector = collect(tmp_path / "c.jsonl", writer)
    assert collector.make_up(40, lambda line: None) == 40
    sources = [c.source for c in read_conversations(tmp_path / "c.jsonl")]
    assert set(sources) == {"own", "free", "text", "follow-up"}
    assert "<user>" in writer.asked  # the template up to the user's turn
    assert any(list(stop) == [ord("|")] for stop in writer.stops)  # which ends where the template ends it
    assert any("a long enough text." in asked and asked.count("<user>") == 2 for asked in writer.asked)
    assert collect(tmp_path / "c.jsonl", writer).made_up == 40


def test_without_a_template_texts_are_gone_on_with(tmp_path) -> None:
    writer = Echo("x" * 100)
    collect(tmp_path / "c.jsonl", writer, template=False, start=ord("^")).make_up(4, lambda line: None)
    written = list(read_conversations(tmp_path / "c.jsonl"))
    assert [len(c.prompt) for c in written] == [1 + BEGINNING_TOKENS] * 4
    with pytest.raises(ConfigError, match="without chat template or first token"):
        collect(tmp_path / "d.jsonl", writer, template=False).make_up(4, lambda line: None)


def test_questions_are_answered_once(tmp_path) -> None:
    lines = [{"question": "q"}, {"turns": ["first", "second"]}, {"messages": [{"role": "user", "content": "m"}]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = read_prompts(tmp_path / "p.jsonl", Chat(Letters()))
    texts = ["".join(map(chr, a.tokens)) for a in asked]
    assert texts == [f"<user>{t}|<assistant>" for t in ("q", "first", "m")]
    writer = Echo("answer")
    assert collect(tmp_path / "c.jsonl", writer).answer_prompts(asked, lambda line: None) == 3
    assert collect(tmp_path / "c.jsonl", writer).answer_prompts(asked, lambda line: None) == 0
    assert {c.source for c in read_conversations(tmp_path / "c.jsonl")} == {"p"}


def test_lines_without_a_prompt_are_refused(tmp_path) -> None:
    (tmp_path / "p.jsonl").write_text('{"answer": 3}\n')
    with pytest.raises(ConfigError, match=r"line 1 .* expected an object with messages or turns or prompt"):
        read_prompts(tmp_path / "p.jsonl", Chat(Letters()))


def test_invented_requests_differ_and_half_are_answered_greedily() -> None:
    inventor = Inventor(Chat(Letters()), seed=3)
    asked = inventor.invent(["{braces} stay as they are"], 200)
    assert len({a.tokens for a in asked}) > 150
    assert any("{braces}" in "".join(map(chr, a.tokens)) for a in asked)
    assert 0.4 < sum(t == 0 for t in inventor.temperatures(1000)) / 1000 < 0.6
