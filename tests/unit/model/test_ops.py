"""The numba operations against PyTorch, and bitwise against themselves row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dynaspec.model.config import MlpKind, RopeConfig
from dynaspec.model.kernels import row_ops
from dynaspec.model.ops import Norm, Ops, RopeTable

CPU = torch.device("cpu")
ACTIVATIONS: dict[MlpKind, int] = {
    "gated_silu": row_ops.SILU,
    "gated_gelu_tanh": row_ops.GELU_TANH,
    "relu": row_ops.RELU,
    "gelu": row_ops.GELU,
    "gelu_tanh": row_ops.GELU_TANH,
}
WIDTHS = [16, 48, 52, 7]
KINDS: list[MlpKind] = ["gated_silu", "gated_gelu_tanh", "relu", "gelu", "gelu_tanh"]


class KernelOps:
    """The kernels that compiled passes call, one at a time."""

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        out = torch.empty_like(x)
        flat, added, target = (tensor.numpy().reshape(-1) for tensor in (x, delta, out))
        if norm.bias is None:
            row_ops.add_rms_norm(flat, added, norm.weight.numpy(), norm.eps, target)
        else:
            row_ops.add_layer_norm(flat, added, norm.weight.numpy(), norm.bias.numpy(), norm.eps, target)
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        row_ops.softcap(x.numpy().reshape(-1), cap)
        return x

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        out = torch.empty_like(x)
        flat, target = x.numpy().reshape(-1), out.numpy().reshape(-1)
        if norm.bias is None:
            row_ops.rms_norm(flat, norm.weight.numpy(), norm.eps, target)
        else:
            row_ops.layer_norm(flat, norm.weight.numpy(), norm.bias.numpy(), norm.eps, target)
        return out

    def head_norm(self, x: torch.Tensor, norm: Norm) -> None:
        row_ops.head_rms_norm(x.numpy(), norm.weight.numpy(), norm.eps)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, table: RopeTable) -> None:
        row_ops.rotate(x.numpy(), positions.numpy(), table.cos.numpy(), table.sin.numpy(), table.interleaved)

    def activate(self, kind: MlpKind, up: torch.Tensor) -> torch.Tensor:
        if not kind.startswith("gated"):
            row_ops.activate(up.numpy().reshape(-1), ACTIVATIONS[kind])
            return up
        out = torch.empty(up.shape[0], up.shape[1] // 2)
        row_ops.gated(up.numpy(), out.numpy(), ACTIVATIONS[kind])
        return out


Run = Callable[[Ops, torch.Tensor], torch.Tensor]


def check(run: Run, x: torch.Tensor, tolerance: float = 2e-6) -> None:
    """``run`` gives PyTorch's values, and each row the same bits alone as together."""
    together = run(KernelOps(), x.clone())
    torch.testing.assert_close(together, run(Ops(), x.clone()), rtol=1e-5, atol=tolerance)
    for row in range(len(x)):
        assert torch.equal(run(KernelOps(), x[row : row + 1].clone())[0], together[row])


def norm(width: int, layer: bool) -> Norm:
    return Norm(torch.randn(width), torch.randn(width) if layer else None, 1e-5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layer", [False, True])
def test_norm(width: int, layer: bool) -> None:
    torch.manual_seed(0)
    weights = norm(width, layer)
    check(lambda ops, x: ops.norm(x, weights), torch.randn(5, width) * 3 + 1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layer", [False, True])
def test_add_norm_returns_the_norm_and_updates_the_sum(width: int, layer: bool) -> None:
    torch.manual_seed(0)
    weights = norm(width, layer)

    def run(ops: Ops, both: torch.Tensor) -> torch.Tensor:
        x, delta = both[:, :width].clone(), both[:, width:].clone()
        normed = ops.add_norm(x, delta, weights)
        return torch.cat([x, normed], 1)

    check(run, torch.randn(5, 2 * width))


@pytest.mark.parametrize("heads", [1, 3])
def test_head_norm_works_on_a_view(heads: int) -> None:
    torch.manual_seed(0)
    weights = norm(20, layer=False)

    def run(ops: Ops, x: torch.Tensor) -> torch.Tensor:
        ops.head_norm(x[:, :heads], weights)
        return x

    check(run, torch.randn(5, 4, 20))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [4, 12])
def test_rotate(interleaved: bool, rotated: int) -> None:
    torch.manual_seed(0)
    config = RopeConfig(rotated, tuple(0.5**i for i in range(rotated // 2)), interleaved, amplitude=1.2)
    table = RopeTable.build(config, 40, CPU)
    positions = torch.tensor([0, 39, 7])
    x = torch.randn(3, 4, 12)
    ours, theirs = x.clone(), x.clone()
    KernelOps().rotate(ours[:, :3], positions, table)
    Ops().rotate(theirs[:, :3], positions, table)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[:, 3], x[:, 3])
    assert torch.equal(ours[..., rotated:], x[..., rotated:])
    torch.testing.assert_close(ours[0, :3, :rotated], x[0, :3, :rotated] * 1.2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [10, 32, 50])
def test_activation(kind: MlpKind, width: int) -> None:
    torch.manual_seed(0)
    check(lambda ops, x: ops.activate(kind, x), torch.randn(5, width) * 4)


@pytest.mark.parametrize("kind", ["gated_silu", "gelu", "gelu_tanh"])
def test_activation_of_extreme_values(kind: MlpKind) -> None:
    x = torch.tensor([[-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e30, 1.0] + [1.0] * 10])
    check(lambda ops, x: ops.activate(kind, x), x)


def test_softcap() -> None:
    torch.manual_seed(0)
    check(lambda ops, x: ops.softcap(x, 30.0), torch.randn(4, 37) * 40, tolerance=1e-5)
