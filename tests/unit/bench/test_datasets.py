from __future__ import annotations

import pytest

from dynaspec.bench.datasets import BenchPrompt, fit, load_dataset, load_prompts, spread
from dynaspec.contract.errors import ConfigError


class Words:
    """A tokenizer whose tokens are words."""

    def encode(self, text, *, special_tokens=True):
        return [*([0] if special_tokens and text.startswith("<") else []), *(len(word) for word in text.split())]

    def render_chat(self, messages):
        (message,) = messages
        return f"<{message['role']}> {message['content']} <answer>"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "spec_bench.jsonl",
            '{"category": "coding", "turns": ["write it", "again"]}\n\n{"category": "qa", "turns": ["who?"]}\n',
            [BenchPrompt("write it", "coding"), BenchPrompt("who?", "qa")],
        ),
        (
            "gsm8k.jsonl",
            '{"question": "1 + 1?", "answer": "2 #### 2"}',
            [BenchPrompt("Question: 1 + 1?\nAnswer:")],
        ),
        ("own.jsonl", '{"prompt": "two\\nlines"}', [BenchPrompt("two\nlines")]),
        ("plain.txt", "first\n\n second \n", [BenchPrompt("first"), BenchPrompt(" second ")]),
    ],
)
def test_forms(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_text(content, "utf-8")
    assert load_prompts(path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("{", "p.jsonl:1 is not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}', "p.jsonl:2 has no text; expected an object with prompt, turns or question"),
        ('["a"]', "p.jsonl:1 has no text"),
        ('{"turns": []}', "has no text"),
        ('{"prompt": 3}', "has no text"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, content, message):
    path = tmp_path / "p.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_prompts(path)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(tmp_path / "none.txt")


def test_spread_hears_every_part():
    prompts = [BenchPrompt(str(i)) for i in range(10)]
    assert [p.text for p in spread(prompts, 4)] == ["0", "2", "5", "7"]
    assert spread(prompts, 99) == prompts


def test_long_prompts_lose_their_beginning():
    fitted = fit([BenchPrompt("a bb ccc dddd"), BenchPrompt("a")], Words(), 2)
    assert fitted.token_ids == ((3, 4), (1,))
    assert fitted.cut == 1
    with pytest.raises(ConfigError, match="no room"):
        fit([BenchPrompt("a")], Words(), 0)


def test_named_sets(tmp_path):
    demo = load_dataset(None, None)
    assert demo.label == "demo"
    assert len(demo.prompts) == 12
    assert load_dataset("demo", None) == demo
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "1 + 1?", "turns": ["hello"]}\n')
    assert load_dataset(None, path).label == "mine"
    assert load_dataset("gsm8k", path).prompts[0].text.startswith("Question: 1 + 1?")
    assert load_dataset("spec_bench", path).prompts[0].text == "hello"
    with pytest.raises(ConfigError, match="expected an object with prompt"):
        load_dataset("prompts", path)
    with pytest.raises(ConfigError, match="'gsm8k' has no path"):
        load_dataset("gsm8k", None)
    with pytest.raises(ConfigError, match="name is 'other'; expected spec_bench, gsm8k, prompts"):
        load_dataset("other", path)


def test_prompts_are_rendered_as_chats_where_asked() -> None:
    fitted = fit([BenchPrompt("a bb")], Words(), 9, chat=True)
    assert fitted.token_ids == ((6, 1, 2, 8),)
