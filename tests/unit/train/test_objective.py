from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dynaspec.contract.errors import ConfigError
from dynaspec.train.model import build
from dynaspec.train.objective import Distillation, NextToken

from .conftest import TINY


@pytest.fixture
def batch():
    return torch.randint(0, TINY.vocab, (2, 9), generator=torch.Generator().manual_seed(0))


def test_next_token_loss_is_that_of_transformers(batch):
    model = build(TINY, seed=1)
    expected = model(input_ids=batch, labels=batch).loss
    assert torch.allclose(NextToken(model)(batch), expected, atol=1e-5)


def test_distillation_mixes_divergence_and_cross_entropy(batch):
    target, drafter = build(TINY, seed=1), build(TINY, seed=2)
    with torch.no_grad():
        p = target(input_ids=batch[:, :-1]).logits.flatten(0, 1).log_softmax(-1)
        q = drafter(input_ids=batch[:, :-1]).logits.flatten(0, 1).log_softmax(-1)
    divergence = F.kl_div(q, p, log_target=True, reduction="batchmean")
    text = F.nll_loss(q, batch[:, 1:].flatten())
    got = Distillation(target, drafter, weight=0.75)(batch)
    assert torch.allclose(got, 0.75 * divergence + 0.25 * text, atol=1e-5)
    got.backward()
    assert all(p.grad is None for p in target.parameters())
    assert drafter.model.embed_tokens.weight.grad is not None


def test_a_perfect_drafter_has_no_divergence(batch):
    target, drafter = build(TINY, seed=1), build(TINY, seed=1)
    assert abs(Distillation(target, drafter, weight=1.0)(batch).item()) < 1e-5


def test_weight_is_checked():
    with pytest.raises(ConfigError, match=r"kl_weight: got 1\.5, expected 0 to 1"):
        Distillation(build(TINY, 0), build(TINY, 0), weight=1.5)
