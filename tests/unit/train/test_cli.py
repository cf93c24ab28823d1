from __future__ import annotations

import json

import pytest
import torch

from dynaspec.train.data import TokenSet, load_tokenizer
from support.commands import run_command


def lm(*arguments: object):
    return run_command("train", "lm", *arguments)


@pytest.fixture
def options(library, gsm8k, tmp_path):
    sizes = ("--target-size", "64,2,1,1,64", "--draft-size", "64,1,1,1,64", "--vocab", 300)
    limits = ("--target-steps", 4, "--draft-steps", 4, "--prompts", 4, "--prompts-per-kind", 2)
    places = ("--corpus", library, "--gsm8k", gsm8k, "--work", tmp_path / "work", "--out", tmp_path / "out")
    return (*places, *sizes, *limits, "--seq-len", 32, "--batch-rows", 2, "--device", "cpu")


def test_all_stages_make_a_measured_pair(options, tmp_path):
    result = lm(*options)
    assert result.code == 0, result.err
    evaluation = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert evaluation["prompts"] == {"code": 2, "maths": 2}
    assert set(evaluation["held_out_loss"]["draft"]) == {"code", "maths", "all"}
    assert len(evaluation["agreement"]["all"]["survival"]) == 5
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    assert training["target"]["steps"] == 4
    for name in ("target", "draft"):
        card = (tmp_path / "out" / name / "README.md").read_text()
        assert "Held-out loss" in card
        assert "Python Software Foundation License" in card

    work = tmp_path / "work"
    tokenizer = load_tokenizer(work / "tokenizer")
    seen = tokenizer.decode(TokenSet.load(work / "train.npz").tokens.tolist())
    assert "m3.py" not in seen
    assert "def f3" in seen
    assert "def f100" not in seen  # sched.py is held out

    again = lm(*options, "--stage", "target")
    assert "target: resumed at step 4" in again.out
    refused = lm(*options, "--stage", "target", "--extend")
    assert "stable.pt' does not exist, expected a run that reached its decay" in refused.err
    assert lm(*options, "--stage", "target", "--no-resume", "--decay-share", 0.5).code == 0
    longer = lm(*options, "--stage", "target", "--extend", "--target-steps", 6)
    assert "target: resumed at step 3" in longer.out
    assert torch.load(work / "target" / "latest.pt", weights_only=True)["progress"]["step"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stage", "everything"), "stage: got 'everything', expected one of prepare, target"),
        (("--target-size", "64,2"), "target_size: got '64,2', expected 5 positive numbers"),
        (("--target-size", "64,2,3,2,64"), "kv_heads: got 2, expected a divisor of the 3 heads"),
        (("--draft-lr", "fast"), "draft_lr: got 'fast', expected 2 positive numbers"),
        (("--target-until", "noon"), "until: got 'noon', expected HH:MM"),
        (("--device", "tpu"), "device: got 'tpu', expected auto, cpu or cuda"),
        (("--vocab", "100"), "vocab: got 100, expected 257 to 65536"),
        (("--seq-len", "4096"), "seq_len: got 4096, expected 2 to 2048"),
        (("--kl-weight", "3"), "kl_weight: got 3.0, expected 0 to 1"),
        (("--extend", "--no-resume"), "extend: got it together with no resume"),
    ],
)
def test_errors_say_got_and_expected(options, arguments, message):
    result = lm(*options, *arguments)
    assert result.code == 2
    assert f"error: {message}" in result.err
    assert "Traceback" not in result.out + result.err


def test_a_stage_names_what_it_misses(options):
    for stage, missing in (("target", "train.npz"), ("evaluate", "holds no model")):
        result = lm(*options, "--stage", stage)
        assert result.code == 2
        assert missing in result.err
    assert lm(*options, "--stage", "prepare").code == 0
    result = lm(*options, "--stage", "draft")
    assert result.code == 2
    assert "expected an earlier stage's" in result.err
