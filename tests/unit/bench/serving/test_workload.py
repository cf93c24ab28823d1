"""Requests drawn from data sets and cut to the server's room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynaspec.bench.serving.server import LoadWorkload
from dynaspec.bench.serving.workload import RequestSpec, draw_requests, fit_requests
from dynaspec.contract.errors import ConfigError


class Words:
    """A token a word; ids are the words' lengths."""

    async def encode(self, text):
        return [len(word) for word in text.split()]

    async def decode(self, ids):
        return " ".join("x" * i for i in ids)

    async def vocabulary(self):
        return [3, 5, 8]


@pytest.fixture
def spec_bench(tmp_path):
    path = tmp_path / "spec.jsonl"
    rows = [{"category": "ab"[i % 2], "turns": [f"question {i}", "and then?"]} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sharegpt(tmp_path):
    def conversation(question, answer):
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}

    long = "w " * 1100
    entries = [
        conversation("a b c d e", "1 2 3 4 5 6"),
        conversation("too short", "1 2 3 4 5"),
        conversation(long, "1 2 3 4 5"),
        conversation("a b c d", "1 2"),
        {"conversations": [{"from": "human", "value": "nobody answers here at all"}]},
        conversation("v w x y z", "1 2 3 4"),
    ]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(entries))
    return path


async def draw(tokens=None, **workload):
    return await draw_requests(LoadWorkload(**workload), tokens)


async def test_spec_bench(spec_bench):
    given = {"dataset_name": "spec_bench", "dataset_path": spec_bench}
    asked = await draw(**given, num_prompts=5)
    assert asked == await draw(**given, num_prompts=5), "the same seed draws the same"
    assert asked != await draw(**given, num_prompts=5, seed=1)
    assert len({one.prompt for one in asked}) == 5
    assert {one.output_len for one in asked} == {256}
    in_order = await draw(**given, num_prompts=3, shuffle=False, output_len=9)
    assert in_order == [RequestSpec(f"question {i}", 9, "ab"[i % 2]) for i in range(3)]
    only = await draw(**given, num_prompts=4, category="b")
    assert {one.category for one in only} == {"b"}


async def test_too_few_prompts(spec_bench):
    again = await draw(dataset_path=spec_bench, num_prompts=12)
    assert len(again) == 12
    assert len({one.prompt for one in again}) == 8
    assert len(await draw(dataset_path=spec_bench, num_prompts=12, oversample=False)) == 8


async def test_custom(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 7}\n{"prompt": "two"}\n')
    given = {"dataset_name": "custom", "dataset_path": path, "num_prompts": 2, "shuffle": False}
    assert await draw(**given) == [RequestSpec("one", 7), RequestSpec("two", 256)]
    assert [one.output_len for one in await draw(**given, output_len=3)] == [3, 3]


async def test_demo():
    asked = await draw(dataset_name="demo", num_prompts=2)
    assert [one.output_len for one in asked] == [128, 128]


async def test_random():
    given = {"num_prompts": 20, "input_len": 10, "prefix_len": 4, "tokens": Words()}
    asked = await draw(**given)
    assert {len(one.prompt) for one in asked} == {14}
    assert {one.prompt[:4] for one in asked} == {asked[0].prompt[:4]}
    assert {token for one in asked for token in one.prompt} == {3, 5, 8}
    assert {one.output_len for one in asked} == {128}
    assert asked == await draw(**given)
    varied = await draw(**given, range_ratio=0.5, output_len=100)
    assert {len(one.prompt) - 4 for one in varied} <= set(range(5, 16))
    assert len({len(one.prompt) for one in varied}) > 3
    assert all(50 <= one.output_len <= 150 for one in varied)


async def test_sharegpt(sharegpt):
    given = {"dataset_name": "sharegpt", "dataset_path": sharegpt, "num_prompts": 2, "tokens": Words()}
    assert await draw(**given, shuffle=False) == [RequestSpec("a b c d e", 6), RequestSpec("v w x y z", 4)]
    longer = await draw(**given | {"num_prompts": 4}, shuffle=False, oversample=False, output_len=2)
    assert [one.prompt for one in longer] == ["a b c d e", "a b c d", "v w x y z"], "short answers do not matter then"
    assert {one.output_len for one in longer} == {2}


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"dataset_name": "imagenet"}, "name is 'imagenet'; expected demo, random, sharegpt"),
        ({"dataset_name": "spec_bench"}, "'spec_bench' has no path"),
        ({"dataset_name": "sharegpt"}, "'sharegpt' has no path"),
        ({"dataset_name": "random"}, "needs a tokenizer"),
        ({"dataset_name": "random", "dataset_path": Path("x"), "tokens": Words()}, "expected no file"),
        ({"dataset_name": "demo", "dataset_path": Path("x")}, "expected one of them"),
        ({"dataset_path": Path("nowhere.jsonl")}, "cannot be read"),
        ({"dataset_name": "sharegpt", "dataset_path": Path("nowhere.json"), "tokens": Words()}, "cannot be read"),
        ({"dataset_name": "demo", "category": "poetry"}, "no prompt has; expected one of 'completion'"),
    ],
)
async def test_what_cannot_be_drawn(workload, message):
    with pytest.raises(ConfigError, match=message):
        await draw(**workload)


@pytest.mark.parametrize("content", ["[]", "{}", '[{"conversations": 3}]', "[7]"])
async def test_no_conversations(tmp_path, content):
    path = tmp_path / "share.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no conversations"):
        await draw(dataset_name="sharegpt", dataset_path=path, tokens=Words())


@pytest.mark.parametrize("value", ['"many"', "0", "1.5"])
async def test_output_tokens_must_be_a_number(tmp_path, value):
    path = tmp_path / "own.jsonl"
    path.write_text(f'{{"prompt": "one", "output_tokens": {value}}}\n')
    with pytest.raises(ConfigError, match=r"own.jsonl:1 has output_tokens .*expected a whole number"):
        await draw(dataset_name="custom", dataset_path=path)


LONG = "a bb ccc dddd eeeee"


async def test_long_prompts_lose_their_beginning():
    asked = [RequestSpec(LONG, 5), RequestSpec("a bb", 5), RequestSpec((1, 2, 3, 4, 5, 6), 5)]
    fitted = await fit_requests(asked, Words(), 8, is_chat=False)
    assert [one.prompt for one in fitted.requests] == [(3, 4, 5), "a bb", (4, 5, 6)]
    assert fitted.cut == 2
    assert not fitted.unchecked


async def test_chats_are_text():
    fitted = await fit_requests([RequestSpec(LONG, 5), RequestSpec((1, 2), 5)], Words(), 64 + 5 + 2, is_chat=True)
    assert [one.prompt for one in fitted.requests] == ["xxxx xxxxx", "x xx"]
    assert fitted.cut == 1


@pytest.mark.parametrize(("tokens", "length"), [(None, 8), (Words(), None)])
async def test_what_cannot_be_checked_is_left_alone(tokens, length):
    fitted = await fit_requests([RequestSpec(LONG, 5)], tokens, length, is_chat=False)
    assert fitted.requests == (RequestSpec(LONG, 5),)
    assert fitted.unchecked


async def test_no_room():
    with pytest.raises(ConfigError, match="answers of 8 tokens leave no room for a prompt in the model's 8"):
        await fit_requests([RequestSpec(LONG, 8)], Words(), 8, is_chat=False)
