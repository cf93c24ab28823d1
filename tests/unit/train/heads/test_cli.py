from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dynaspec.train.data import save_tokenizer, train_tokenizer
from dynaspec.train.heads.conversations import read_conversations
from dynaspec.train.model import Shape, build, export
from support.commands import Result, run_command

SHAPE = Shape(hidden=32, layers=6, heads=2, kv_heads=1, intermediate=48, head_dim=16, vocab=300, positions=128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = train_tokenizer([f"def f{i}(x):\n    return x + {i}\n" for i in range(50)], SHAPE.vocab)
    save_tokenizer(tokenizer, folder / "tokenizer", SHAPE.positions)
    export(build(SHAPE, 1), folder / "tokenizer", folder / "model")
    return folder / "model"


@pytest.fixture
def options(model: Path, tmp_path: Path) -> tuple[object, ...]:
    prompts = tmp_path / "asked.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"def f{i}(a):"}) + "\n" for i in range(6)))
    places = ("--model", model, "--work", tmp_path / "work", "--out", tmp_path / "head", "--prompts", prompts)
    data = ("--self-written", 16, "--new-tokens", 12, "--at-once", 16, "--held-out", 2, "--draft-vocab", 64)
    steps = ("--batch-tokens", 64, "--micro-tokens", 32, "--evaluate-tokens", 128, "--warmup-steps", 2)
    return (*places, *data, *steps, "--device", "cpu", "--longest", 128)


def eagle3(*arguments: object) -> Result:
    return run_command("train", "eagle3", *arguments)


def test_all_stages_make_a_head_and_a_second_run_goes_on(options, tmp_path: Path) -> None:
    result = eagle3(*options, "--tokens", 256, "--workers", 1)
    assert result.code == 0, result.err
    written = list(read_conversations(tmp_path / "work" / "conversations.jsonl"))
    assert {"asked", "free"} <= {c.source for c in written}
    assert sum(c.source == "asked" for c in written) == 6

    weights = load_file(tmp_path / "head" / "model.safetensors")
    assert weights["fc.weight"].shape == (32, 96)
    assert weights["lm_head.weight"].shape == (64, 32)
    facts = json.loads((tmp_path / "head" / "training.json").read_text())
    assert facts["data"]["held_out_conversations"] >= 1
    assert "tokens a step" in (tmp_path / "head" / "README.md").read_text()

    again = eagle3(*options, "--tokens", 512, "--workers", 1)
    assert "goes on at 0.00 M tokens" in again.out
    state = torch.load(tmp_path / "work" / "eagle3" / "latest.pt", weights_only=True)
    assert state["progress"]["tokens"] >= 512
    written = list(read_conversations(tmp_path / "work" / "conversations.jsonl"))
    assert sum(c.source == "asked" for c in written) == 6  # nothing is asked twice
    assert eagle3(*options, "--tokens", 600, "--extend", "--workers", 1).code == 0
    assert eagle3(*options, "--stage", "export").out.startswith("written to")


def test_stopping_half_way_changes_nothing(options, tmp_path: Path) -> None:
    """A run of one go and a run that was cut end with the same weights."""
    assert eagle3(*options, "--stage", "data").code == 0
    assert eagle3(*options, "--stage", "states").code == 0
    train = (*options, "--stage", "train", "--workers", 1, "--decay-share", 0)
    assert eagle3(*train, "--tokens", 400, "--no-resume").code == 0
    straight = torch.load(tmp_path / "work" / "eagle3" / "latest.pt", weights_only=True)
    assert eagle3(*train, "--tokens", 150, "--no-resume").code == 0
    assert eagle3(*train, "--tokens", 400).code == 0
    resumed = torch.load(tmp_path / "work" / "eagle3" / "latest.pt", weights_only=True)
    assert straight["place"] == resumed["place"]
    for name, tensor in straight["head"].items():
        torch.testing.assert_close(resumed["head"][name], tensor, rtol=0, atol=0)


def test_two_workers_learn_what_one_process_learns(options, tmp_path: Path) -> None:
    assert eagle3(*options, "--stage", "data").code == 0
    assert eagle3(*options, "--stage", "states").code == 0
    train = (*options, "--stage", "train", "--no-resume", "--tokens", 64)
    assert eagle3(*train, "--workers", 1).code == 0
    alone = torch.load(tmp_path / "work" / "eagle3" / "latest.pt", weights_only=True)["head"]
    assert eagle3(*train, "--workers", 2).code == 0
    together = torch.load(tmp_path / "work" / "eagle3" / "latest.pt", weights_only=True)["head"]
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=0.02, atol=2e-3)


def test_without_a_cache_a_head_learns_what_it_learns_with_one(options, tmp_path: Path) -> None:
    assert eagle3(*options, "--stage", "data").code == 0
    assert eagle3(*options, "--stage", "states", "--states-gb", 0).code == 0
    assert not list((tmp_path / "work").glob("states/*"))
    train = (*options, "--stage", "train", "--no-resume", "--tokens", 64, "--workers", 1)
    result = eagle3(*train, "--states-gb", 0)
    assert result.code == 0, result.err
    on_demand = torch.load(tmp_path / "work" / "eagle3" / "latest.pt", weights_only=True)
    assert eagle3(*options, "--stage", "states").code == 0
    assert eagle3(*train).code == 0
    cached = torch.load(tmp_path / "work" / "eagle3" / "latest.pt", weights_only=True)
    assert on_demand["place"] == cached["place"]
    for name, tensor in cached["head"].items():
        torch.testing.assert_close(on_demand["head"][name], tensor, rtol=0.02, atol=2e-3)


def test_a_finished_head_is_measured_by_category_and_trained_on_from(options, tmp_path: Path) -> None:
    lines = [{"turns": [f"def g{i}(b):"], "category": "code" if i % 2 else "prose"} for i in range(6)]
    (tmp_path / "measure.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = eagle3(*options, "--tokens", 256, "--workers", 1, "--measure", tmp_path / "measure.jsonl")
    assert result.code == 0, result.err
    measured = json.loads((tmp_path / "head" / "training.json").read_text())["measured"]
    assert set(measured["categories"]) == {"code", "prose"}
    assert measured["all"]["conversations"] == 6
    assert measured["all"]["acceptance_length"] >= 1
    assert "| code | 3 |" in (tmp_path / "head" / "README.md").read_text()

    before = load_file(tmp_path / "head" / "model.safetensors")
    elsewhere = ("--work", tmp_path / "work2", "--out", tmp_path / "head2", "--start-from", tmp_path / "head")
    # Rates so small that the weights stay: what was loaded comes out again, under another scale of the states.
    again = eagle3(*options, *elsewhere, "--tokens", 64, "--workers", 1, "--lr", "1e-9,1e-9", "--draft-vocab", 32)
    assert again.code == 0, again.err
    after = load_file(tmp_path / "head2" / "model.safetensors")
    assert set(after) == set(before)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0.02, atol=1e-3)
    assert "Trained on from" in (tmp_path / "head2" / "README.md").read_text()


def test_only_heads_of_this_kind_and_target_are_trained_on_from(options, tmp_path: Path) -> None:
    assert eagle3(*options, "--tokens", 64, "--workers", 1).code == 0
    elsewhere = (*options, "--work", tmp_path / "work2", "--out", tmp_path / "head2", "--start-from", tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}))
    refused = eagle3(*elsewhere, "--tokens", 64, "--workers", 1)
    assert refused.code == 2
    assert "expected one layer on [1, 3, 5]" in refused.err
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    assert eagle3(*options, "--work", tmp_path / "work2", "--stage", "data").code == 0
    assert eagle3(*options, "--work", tmp_path / "work2", "--stage", "states", "--draft-vocab", 32).code == 0
    refused = eagle3(*elsewhere, "--stage", "train")
    assert "with another draft vocabulary" in refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stage", "nothing"), "stage: got 'nothing', expected one of data, states, train, export, measure, all"),
        (("--stage", "states"), "conversations: got none in the work folder"),
        (("--stage", "train"), "basis: got none in the work folder"),
        (("--stage", "measure"), "measure: got no prompts, expected --measure FILE"),
        (("--measure", "nowhere.jsonl"), "measure: got 'nowhere.jsonl', expected a file of prompts"),
        (("--start-from", "/nowhere"), "/nowhere"),
        (("--lr", "1"), "lr: got '1', expected 2 positive numbers"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(options, arguments, message: str) -> None:
    result = eagle3(*options, *arguments)
    assert result.code == 2
    assert message in result.err


def test_a_run_of_another_shape_is_not_continued(options, tmp_path: Path) -> None:
    assert eagle3(*options, "--tokens", 64, "--workers", 1).code == 0
    refused = eagle3(*options, "--tokens", 128, "--workers", 1, "--seed", 9, "--stage", "train")
    assert "was trained with seed = 1234, expected 9" in refused.err
    roomless = eagle3(*options, "--stage", "states", "--states-gb", 0, "--self-written", 4)
    assert roomless.code == 0  # there is nothing left to compute
