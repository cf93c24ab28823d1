"""A tiny head, and conversations with made-up states."""

from __future__ import annotations

import pytest
import torch

from dynaspec.train.heads.eagle import Eagle3Head, initialise_eagle3
from dynaspec.train.heads.head import Example, chains_of
from dynaspec.train.heads.shape import DraftVocabulary, HeadShape

SHAPE = HeadShape(
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=24,
    vocab=50,
    draft_vocab=20,
    aux_layers=(1, 2, 3),
    positions=64,
)
VOCABULARY = DraftVocabulary(torch.arange(0, 40, 2), SHAPE.vocab)


@pytest.fixture(params=[True, False], ids=["norm_before_residual", "plain_residual"])
def head(request: pytest.FixtureRequest) -> Eagle3Head:
    return make_head(norm_before_residual=request.param)


def make_head(norm_before_residual: bool = True, seed: int = 3) -> Eagle3Head:
    shape = HeadShape(**{**SHAPE.as_facts(), "aux_layers": (1, 2, 3), "norm_before_residual": norm_before_residual})
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(shape.vocab, shape.hidden, generator=generator)
    scale = torch.rand(shape.aux_width, generator=generator) + 0.5
    head = Eagle3Head(shape, VOCABULARY, embedding, scale)
    initialise_eagle3(head, torch.randn(shape.draft_vocab, shape.hidden, generator=generator), None, seed)
    for parameter in head.parameters():
        if parameter.ndim == 1:  # norms that do something
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head


def example(prompt: int, answer: int, seed: int = 0) -> Example:
    generator = torch.Generator().manual_seed(seed)
    length, chains = prompt + answer, chains_of(prompt, prompt + answer)
    return Example(
        tokens=torch.randint(0, SHAPE.vocab, (length,), generator=generator),
        prompt=prompt,
        aux=torch.randn(length - 1, SHAPE.aux_width, generator=generator),
        last=torch.randn(chains, SHAPE.hidden, generator=generator),
        mass=torch.rand(chains, generator=generator),
    )
