"""The target's continuations that a drafter learns from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.train.data import TokenSet
from dynaspec.train.distill import (
    DistillSettings,
    continue_greedily,
    generate_documents,
    open_engine,
    write_continuations,
)
from dynaspec.train.model import load_exported
from dynaspec.train.optimizer import Budget
from unit.train.conftest import save_checkpoint

CPU = torch.device("cpu")
PROMPTS = [np.array(p, dtype=np.uint16) for p in ([4, 5, 6, 7, 8], [9, 10], [200], [11, 12, 13], [14])]


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("target"), tokenizer, seed=6)


def test_continuations_are_the_models_greedy_text(folder):
    with open_engine(folder, 32, CPU) as llm:
        tails = continue_greedily(llm, PROMPTS, 8)
    model = load_exported(folder, CPU)
    for prompt, tail in zip(PROMPTS, tails, strict=True):
        ids = prompt.tolist()
        while len(ids) < len(prompt) + 8 and (ids[-1] != 0 or len(ids) == len(prompt)):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tail.tolist() == ids[len(prompt) :]


def test_end_of_text_ends_a_continuation_and_belongs_to_it(folder):
    with open_engine(folder, 32, CPU) as llm:
        tails = continue_greedily(llm, [np.array([i], dtype=np.uint16) for i in range(300)], 16)
    ended = [tail for tail in tails if 0 in tail]
    assert ended
    assert all(tail.tolist().index(0) == len(tail) - 1 for tail in ended)
    assert all(len(tail) == 16 for tail in tails if 0 not in tail)


def test_writing_can_be_ended_between_batches(folder):
    asked = []

    def go_on(done):
        asked.append(len(done))
        return len(done) < 4

    with open_engine(folder, 32, CPU) as llm:
        made = generate_documents(llm, PROMPTS, 4, 2, go_on)
    assert asked == [0, 2, 4]
    assert made.documents == 4
    assert all(made.document(i)[: len(p)].tolist() == p.tolist() for i, p in enumerate(PROMPTS[:4]))


def test_a_spent_budget_leaves_one_batch(folder, documents, tokenizer, tmp_path):
    heard = []
    settings = DistillSettings(prompts=6, prompt_tokens=8, new_tokens=4, batch=2)
    path = tmp_path / "generated.npz"

    def write(target, budget):
        return write_continuations(target, documents, tokenizer, settings, budget, 1, CPU, path, heard.append)

    made = write(folder, Budget(max_seconds=0.0))
    assert made.documents == 2
    assert all(0 < len(made.document(i)) <= 12 for i in range(2))
    assert (heard[0].documents, heard[0].prompts, heard[0].share) == (2, 6, 1.0)
    assert heard[0].figures.startswith("2 of 6")
    assert TokenSet.load(path).tokens.tolist() == made.tokens.tolist()
    again = write(tmp_path / "no target is asked for what is there", Budget(max_seconds=60.0))
    assert again.documents == 2

    path.unlink()
    assert write(folder, Budget(max_steps=1)).documents == 6
    assert [report.documents for report in heard[1:]] == [2, 4, 6]


def test_settings_are_checked():
    for name in ("prompts", "prompt_tokens", "new_tokens"):
        with pytest.raises(ConfigError, match=f"{name}: got 0, expected at least 1"):
            DistillSettings(**{name: 0})
