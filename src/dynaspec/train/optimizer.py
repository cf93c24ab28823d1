"""Muon for the hidden matrices, AdamW for embeddings and norms.

Muon: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). The update
is the momentum matrix with all its singular values moved near one. ``torch.optim.Muon`` does the
same in bfloat16; stepping on the Gram matrix, as this one does for long matrices, needs float32:
in bfloat16 the loss soon rises again. Asked for bfloat16, it therefore steps on the matrix itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

# Coefficients of the odd quintic x -> a x + b x^3 + c x^5, from the publication above.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move the singular values of ``matrix`` [rows, columns] near one, keeping its singular vectors.

    Products are taken in ``dtype``.

    A quintic step is X ← Z X with G = X Xᵀ and Z = aI + bG + cG². Since Z is a polynomial in G, the
    next G is Z G Z: where X is much longer than G it pays to step on G alone and to multiply X by
    the product of all Z once, at the end.
    """
    x = matrix.float()
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    x = (x / x.norm().clamp_min(1e-7)).to(dtype)  # Frobenius: no singular value exceeds one now
    by_gram = x.shape[1] > 2 * x.shape[0] and dtype == torch.float32
    x = _by_gram(x, steps) if by_gram else _directly(x, steps)
    return (x.T if tall else x).to(matrix.dtype)


def _directly(x: Tensor, steps: int) -> Tensor:
    a, b, c = QUINTIC
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_gram(x: Tensor, steps: int) -> Tensor:
    a, b, c = QUINTIC
    gram = x @ x.T
    product: Tensor | None = None
    for step in range(steps):
        z = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        z.diagonal().add_(a)
        product = z if product is None else z @ product
        if step + 1 < steps:
            gram = z @ gram @ z
            gram = (gram + gram.T) / 2  # stay symmetric in spite of rounding
    return x if product is None else product @ x


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised; the learning rate is the spectral size of a square update."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        products: torch.dtype = torch.float32,
    ) -> None:
        """``products`` is the dtype in which updates are orthogonalised."""
        self._products = products
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        average = state["momentum"]
        average.lerp_(gradient, 1 - group["momentum"])
        update = orthogonalise(gradient.lerp(average, group["momentum"]), dtype=self._products)
        rows, columns = parameter.shape
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates and decay of both optimizers."""

    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    weight_decay: float = 0.05


class Optimizers:
    """Both optimizers as one: a step, a learning-rate factor, a state."""

    def __init__(self, model: nn.Module, rates: Rates, products: torch.dtype = torch.float32) -> None:
        """``products``: see :class:`Muon`."""
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            inner = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
            (matrices if inner else others).append(parameter)
        self._muon = Muon(matrices, rates.matrix_lr, weight_decay=rates.weight_decay, products=products)
        self._adamw = AdamW(others, rates.other_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
        self._weight_decay = rates.weight_decay
        self._peaks = ((self._muon, rates.matrix_lr), (self._adamw, rates.other_lr))

    def set_factor(self, factor: float) -> None:
        """Use ``factor`` times the peak learning rates from now on."""
        for optimizer, peak in self._peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor

    def step(self) -> None:
        """Apply the gradients and clear them."""
        for optimizer, _ in self._peaks:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Momenta of both."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the momenta that :meth:`state_dict` gave; the weight decay stays this run's own."""
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])
        for group in self._muon.param_groups:
            group["weight_decay"] = self._weight_decay
