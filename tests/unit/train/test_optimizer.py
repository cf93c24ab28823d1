from __future__ import annotations

import pytest
import torch

from dynaspec.train.model import build
from dynaspec.train.optimizer import Optimizers, Rates, _by_gram, _directly, orthogonalise

from .conftest import TINY


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16), (8, 9)])
def test_singular_values_come_near_one(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_both_ways_agree():
    torch.manual_seed(0)
    x = torch.randn(12, 40)
    x = x / x.norm()
    assert torch.allclose(_by_gram(x, 5), _directly(x, 5), atol=1e-4)
    assert torch.equal(orthogonalise(torch.zeros(4, 4)), torch.zeros(4, 4))


def test_each_weight_has_one_optimizer():
    model = build(TINY, seed=0)
    optimizers = Optimizers(model, Rates())
    muon, adamw = (optimizer for optimizer, _ in optimizers._peaks)
    owned = [p for o in (muon, adamw) for g in o.param_groups for p in g["params"]]
    assert len(owned) == len({id(p) for p in owned}) == len(list(model.parameters()))
    assert all(p.ndim == 2 for g in muon.param_groups for p in g["params"])
    assert any(p is model.model.embed_tokens.weight for g in adamw.param_groups for p in g["params"])
