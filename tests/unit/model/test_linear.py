from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from dynaspec.model import linear
from dynaspec.model.linear import LinearFactory, PackedLinear, PlainLinear, row_invariant

CPU = torch.device("cpu")
SHAPES = [(96, 48), (307, 48), (40, 72), (512, 192), (256, 1408)]


@pytest.fixture
def factory() -> LinearFactory:
    return LinearFactory(CPU, torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_have_the_same_bits_for_every_number_of_rows(
    factory: LinearFactory, shape: tuple[int, int], biased: bool
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if biased else None
    layer = factory(weight, bias)
    x = torch.randn(300, shape[1])
    together = layer(x)
    torch.testing.assert_close(together, F.linear(x, weight, bias), rtol=1e-4, atol=1e-3)
    for rows in (*range(1, 49), 100, 255):
        assert torch.equal(layer(x[7 : 7 + rows].clone()), together[7 : 7 + rows]), f"{rows} rows"


def test_layers_are_packed_on_cpu_in_float32_only() -> None:
    weight = torch.randn(64, 64)
    assert isinstance(LinearFactory(CPU, torch.float32)(weight), PackedLinear)
    assert isinstance(LinearFactory(CPU, torch.bfloat16)(weight.bfloat16()), PlainLinear)


def test_the_original_matrix_is_not_kept() -> None:
    weight = torch.randn(64, 48)
    layer, x = PackedLinear(weight, None), torch.randn(3, 48)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)


def test_a_layer_that_depends_on_the_number_of_rows_is_found_out() -> None:
    weight = torch.randn(32, 32)

    def wobbly(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + (1e-6 if len(x) == 8 else 0.0)

    assert not row_invariant(wobbly, weight, None)


def test_a_wrong_layer_is_found_out() -> None:
    weight = torch.randn(32, 32)
    assert not row_invariant(lambda x: x @ weight, weight, None)


def test_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(linear, "row_invariant", lambda *_: False)
    factory = LinearFactory(CPU, torch.float32)
    with caplog.at_level(logging.WARNING):
        assert isinstance(factory(torch.randn(16, 16)), PlainLinear)
        assert isinstance(factory(torch.randn(16, 16)), PlainLinear)
    assert caplog.text.count("depends on the number of rows") == 1
