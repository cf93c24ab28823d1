from __future__ import annotations

import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.train.heads.conversations import Conversation, append_conversations, read_conversations
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
