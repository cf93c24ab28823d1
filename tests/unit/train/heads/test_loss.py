from __future__ import annotations

import torch

from dynaspec.train.heads.eagle import Eagle3Head
from dynaspec.train.heads.head import join
from dynaspec.train.heads.loss import LossSettings, SoftCrossEntropy, labels, loss_of
from unit.train.heads.conftest import example, make_head


def test_gradients_are_those_of_the_plain_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    normed = torch.randn(300, 8, generator=generator, requires_grad=True)
    weight = torch.randn(20, 8, generator=generator, requires_grad=True)
    truth = torch.softmax(torch.randn(40, 20, generator=generator), dim=-1)
    index = torch.randint(0, 40, (300,), generator=generator)
    weights = torch.rand(300, generator=generator)

    plain = -(truth[index] * torch.log_softmax(normed @ weight.T, dim=-1)).sum(-1)
    wanted = torch.autograd.grad((plain * weights).sum(), (normed, weight))
    total, losses = SoftCrossEntropy.apply(normed, weight, truth, index, weights, torch.arange(300))
    torch.testing.assert_close(losses, plain.detach())
    for got, want in zip(torch.autograd.grad(total, (normed, weight)), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_step_is_the_weighted_mean_over_depths_and_chains(head: Eagle3Head) -> None:
    settings = LossSettings(depths=3, depth_decay=0.5, chain_share=1.0, noise=0.0)
    target_head = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
    batch = join([example(3, 6, seed=1), example(2, 4, seed=2)])
    truth = labels(batch, target_head, 1.0)
    wanted = torch.zeros(())
    for j, depth in enumerate(head.unroll(batch, 3)):
        rows = depth.chains + j
        losses = -(truth[rows] * torch.log_softmax(head.lm_head(depth.read), dim=-1)).sum(-1)
        wanted = wanted + 0.5**j * (losses * batch.mass[rows]).sum() / batch.chains
    parameters = [p for p in head.parameters() if p.requires_grad]
    loss, sums = loss_of(head, target_head, batch, settings, batch.chains, seed=0)
    for got, want in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert sums[:, 1].tolist() == [8, 6, 4]


def test_micro_batches_add_up_to_the_step() -> None:
    head = make_head()
    settings = LossSettings(depths=3, chain_share=1.0, noise=0.0)
    target_head = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
    examples = [example(3, 6, seed=1), example(2, 4, seed=2)]
    chains = sum(e.chains for e in examples)
    for one in examples:
        torch.autograd.backward(loss_of(head, target_head, join([one]), settings, chains, 0)[0])
    apart = head.fc.weight.grad
    head.fc.weight.grad = None
    torch.autograd.backward(loss_of(head, target_head, join(examples), settings, chains, 0)[0])
    torch.testing.assert_close(apart, head.fc.weight.grad, rtol=1e-4, atol=1e-6)
