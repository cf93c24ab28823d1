from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.train.data import Document
from dynaspec.train.distill import continue_greedily, function_headers, maths_prompt, open_engine, training_prompts
from dynaspec.train.evaluate import (
    agreement,
    code_prompts,
    drafter_agreement,
    first_block,
    held_out_loss,
    parses,
)
from dynaspec.train.model import NextToken, build, load_exported

from .conftest import TINY, save_checkpoint

CPU = torch.device("cpu")


def test_agreement_counts():
    right = np.array([True, True, False, True, True, True, True])
    got = agreement(right, draft_len=2)
    assert (got.first_equal, got.first_positions) == (6, 7)
    assert got.positions == 6
    assert got.survived == (5, 4)  # from 0, 1, 3, 4, 5; of these 0, 3, 4, 5 for two in a row
    # Steps: two right and the third token; two right and the sixth; the last one.
    assert (got.steps, got.emitted) == (3, 7)
    assert agreement(np.zeros(0, dtype=bool), 2).steps == 0


def test_agreement_equals_drafting_for_real(tokenizer, tmp_path):
    """A drafter that drafts from its own tokens survives exactly as the one-pass count says."""
    folder = save_checkpoint(tmp_path, tokenizer, seed=2)
    prompt = np.array([5, 6, 7], dtype=np.uint16)
    with open_engine(folder, 32, CPU) as llm:
        tail = continue_greedily(llm, [prompt], 12)[0]
        assert len(tail) == 12
        tail[5::4] = 9  # so that not every draft is right
        starts = [np.concatenate([prompt, tail[:at]]) for at in range(len(tail) - 2)]
        drafted = continue_greedily(llm, starts, 3)
    counted = drafter_agreement(load_exported(folder, CPU), [prompt], [tail], 3, CPU)
    survived = [0, 0, 0]
    for at, drafts in enumerate(drafted):
        drafts = np.pad(drafts, (0, 3 - len(drafts)))
        alive = np.cumprod(drafts == tail[at : at + 3])
        survived = [s + int(a) for s, a in zip(survived, alive, strict=True)]
    assert list(counted.survived) == survived
    assert 0 < survived[2] < survived[0] < len(starts)


def test_held_out_loss_scores_every_token_once(tokens):
    model = build(TINY, seed=1)
    got = held_out_loss(model, tokens, 1000, seq_len=16, device=CPU, rows=3)
    assert got.tokens == len(tokens.tokens)
    stream = torch.from_numpy(np.concatenate([[0], tokens.tokens]).astype(np.int64))
    nats = sum(
        NextToken(model)(row[None]).item() * (len(row) - 1)
        for row in (stream[i : i + 17] for i in range(0, len(tokens.tokens), 16))
    )
    assert got.nats == pytest.approx(nats, rel=1e-5)
    assert got.bits_per_byte == pytest.approx(got.nats / np.log(2) / 1000)


def test_prompts_are_cut_after_function_headers():
    header = "def f(\n    x: dict = {1: 2},\n):  # note"
    text = f"import os\n\n@cache\n{header}\n\n    # why\n    return x\n\ndef g(): pass\n"
    assert [text[a:b] for a, b in function_headers(text)] == [header]
    a = Document("a.py", "code", "x = 1\ndef a(y):\n    return y\ndef b(y):\n    return y\n")
    b = Document("b.py", "code", "def c(y):\n    return y\n")
    prompts = code_prompts([a, b], 3)
    assert [p.header for p in prompts] == ["def a(y):", "def c(y):", "def b(y):"]
    assert prompts[0].text == "x = 1\ndef a(y):"


def test_body_ends_at_the_next_top_level_line():
    assert first_block("    return 1\n\ndef g") == ("    return 1\n\n", True)
    assert first_block("    x = 1\n# note\n    return x\n    y =") == (
        "    x = 1\n# note\n    return x\n",
        False,
    )
    assert parses("def f():", "\n    return 1\n\nclass", ended=False) == (True, True)
    assert parses("def f():", "\n    return (\n", ended=False) == (False, False)
    assert parses("def f():", "\n    return 1", ended=True) == (True, True)
    assert parses("def f():", "nonsense here\n", ended=False) == (False, True)


def test_training_prompts_are_short_and_reproducible(documents, tokenizer):
    maths = [Document("gsm8k/0", "maths", "Question: 1?\nAnswer: 2")]
    assert maths_prompt(maths[0]) == "Question: 1?\nAnswer:"
    prompts = training_prompts([*documents, *maths], tokenizer, 6, 24, seed=1)
    again = training_prompts([*documents, *maths], tokenizer, 6, 24, seed=1)
    assert [p.tolist() for p in prompts] == [p.tolist() for p in again]
    assert all(0 < len(p) <= 24 for p in prompts)
    assert tokenizer.decode(prompts[1].tolist()) == "Question: 1?\nAnswer:"
