"""A corpus and models small enough to train in a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dynaspec.train.data import Document, TokenSet, encode, save_tokenizer, train_tokenizer
from dynaspec.train.model import Shape, build, export

TINY = Shape(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48, head_dim=16, vocab=300, positions=128)


@pytest.fixture(autouse=True)
def arithmetic():
    """One thread; and what training sets for the whole process ends with the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


def source(index: int) -> str:
    body = "".join(f"    total += {index} * {line}\n" for line in range(6))
    return f'"""Module {index}."""\n\ndef f{index}(x):\n    total = x\n{body}    return total\n'


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return [Document(f"m{i}.py", "code", source(i)) for i in range(12)]


@pytest.fixture(scope="session")
def tokenizer(documents):
    return train_tokenizer([d.text for d in documents], TINY.vocab)


@pytest.fixture(scope="session")
def tokens(documents, tokenizer) -> TokenSet:
    return encode(documents, tokenizer)


def save_checkpoint(folder: Path, tokenizer, seed: int, shape: Shape = TINY) -> Path:
    """A random model whose layers matter, in the Hugging Face layout."""
    model = build(shape, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # which start at 0
                parameter.normal_(std=shape.hidden**-0.5)
    save_tokenizer(tokenizer, folder / "tokenizer", shape.positions)
    export(model, folder / "tokenizer", folder / "model")
    return folder / "model"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Sources of which two carry names that the committed list holds out."""
    root = tmp_path / "library"
    root.mkdir()
    for i in range(12):
        (root / f"m{i}.py").write_text(source(i), "utf-8")
    for i, name in enumerate(("sched.py", "chunk.py")):
        (root / name).write_text(source(100 + i), "utf-8")
    (root / "test").mkdir()
    (root / "test" / "left_out.py").write_text(source(999), "utf-8")
    return root


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path
