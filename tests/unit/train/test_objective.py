from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dynaspec.contract.errors import ConfigError
from dynaspec.train.model import build
from dynaspec.train.objective import NextToken
from dynaspec.train.teacher import Distillation, Teacher, coarse_divergence

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
    got = Distillation(Teacher(target, k=TINY.vocab), drafter, weight=0.75)(batch)
    assert torch.allclose(got, 0.75 * divergence + 0.25 * text, atol=1e-3)
    got.backward()
    assert all(p.grad is None for p in target.parameters())
    assert drafter.model.embed_tokens.weight.grad is not None


def test_a_perfect_drafter_has_no_divergence(batch):
    target, drafter = build(TINY, seed=1), build(TINY, seed=1)
    assert abs(Distillation(Teacher(target, k=8), drafter, weight=1.0)(batch).item()) < 1e-4


def test_weight_is_checked():
    with pytest.raises(ConfigError, match=r"kl_weight: got 1\.5, expected 0 to 1"):
        Distillation(Teacher(build(TINY, 0)), build(TINY, 0), weight=1.5)


def test_divergence_counts_what_the_best_tokens_leave():
    p, q = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.4, 0.1, 0.3, 0.2])
    rest = (p[2:].sum() * (p[2:].sum() / q[2:].sum()).log()).item()
    expected = (p[:2] * (p[:2] / q[:2]).log()).sum().item() + rest
    got = coarse_divergence(p[None, :2].log(), q[None, :2].log()).item()
    assert got == pytest.approx(expected, abs=1e-6)


def test_the_target_is_asked_about_a_row_once(batch):
    teacher = Teacher(build(TINY, seed=1), k=4)
    first = teacher(batch[:, :-1])
    assert (first.ids.shape, teacher.rows) == ((2, 8, 4), 2)
    teacher._target = None
    again = teacher(batch[[1, 0, 1], :-1])
    assert torch.equal(again.ids, first.ids[[1, 0, 1]])
    assert torch.equal(again.log_probs, first.log_probs[[1, 0, 1]])


def test_a_row_twice_in_a_batch_is_one_row(batch):
    teacher = Teacher(build(TINY, seed=1), k=4)
    labels = teacher(batch[[0, 1, 0], :-1])
    assert teacher.rows == 2
    assert torch.equal(labels.ids[0], labels.ids[2])
