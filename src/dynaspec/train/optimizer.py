"""How far a run has come, its learning rate (warm-up, stable, decay), and Muon and AdamW.

The stable phase has no end of its own, so a run can be extended from the checkpoint that is kept
before the decay begins.

Muon: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). The update
is the momentum matrix with all its singular values moved near one. ``torch.optim.Muon`` does the
same in bfloat16; stepping on the Gram matrix, as this one does for long matrices, needs float32:
in bfloat16 the loss soon rises again. Asked for bfloat16, it therefore steps on the matrix itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dynaspec.contract.errors import ConfigError

# Coefficients of the odd quintic x -> a x + b x^3 + c x^5, from the publication above.
QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """Warm-up over ``warmup_steps``, then 1, then linear to 0 over the last ``decay_share`` of the run."""

    warmup_steps: int
    decay_share: float

    def factor(self, step: int, progress: float) -> float:
        """Multiplier of the peak learning rate before step ``step`` at ``progress`` (0 … 1)."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if not self.decaying(progress):
            return warm
        return warm * max(0.0, (1.0 - progress) / self.decay_share)

    def decaying(self, progress: float) -> bool:
        """Whether the decay has begun at ``progress``."""
        return self.decay_share > 0 and progress > 1.0 - self.decay_share


@dataclass(frozen=True, slots=True)
class Budget:
    """When a run ends: after ``max_steps`` steps, ``max_tokens`` tokens, ``max_seconds`` of training or at ``until``.

    ``until`` is a Unix time. Progress is the largest of the readings. Against the clock it is
    trained / (trained + left), where time during which the process stood still is not *trained* but
    does shorten what is *left*: a pause makes the rest of the schedule quicker, never later.
    """

    max_steps: int | None = None
    max_seconds: float | None = None
    until: float | None = None
    max_tokens: int | None = None
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if (self.max_steps, self.max_seconds, self.until, self.max_tokens) == (None,) * 4:
            raise ConfigError("budget: got none, expected a number of steps, minutes or a time of day")

    def part(self, share: float) -> Budget:
        """The first ``share`` of this budget, as seen from now."""
        until = None if self.until is None else self.now() + share * max(0.0, self.until - self.now())
        return replace(
            self,
            max_steps=None if self.max_steps is None else max(1, round(share * self.max_steps)),
            max_tokens=None if self.max_tokens is None else max(1, round(share * self.max_tokens)),
            max_seconds=None if self.max_seconds is None else share * self.max_seconds,
            until=until,
        )

    def after(self, share: float) -> Budget:
        """What is left once the first ``share`` is used; a time of day stays what it is."""
        return replace(
            self,
            max_steps=None if self.max_steps is None else max(1, self.max_steps - round(share * self.max_steps)),
            max_tokens=None if self.max_tokens is None else max(1, self.max_tokens - round(share * self.max_tokens)),
            max_seconds=None if self.max_seconds is None else (1.0 - share) * self.max_seconds,
        )

    def progress(self, step: int, trained_seconds: float, tokens: int = 0) -> float:
        """Share of the run that is over before step ``step``; 1 or more: stop."""
        shares = [0.0]
        if self.max_steps is not None:
            shares.append(step / self.max_steps if self.max_steps else 1.0)
        if self.max_tokens is not None:
            shares.append(tokens / self.max_tokens)
        if self.max_seconds is not None:
            shares.append(trained_seconds / self.max_seconds if self.max_seconds else 1.0)
        if self.until is not None:
            left = self.until - self.now()
            shares.append(1.0 if left <= 0 else trained_seconds / (trained_seconds + left))
        return max(shares)

    def seconds_left(self, step: int, trained_seconds: float, tokens: int = 0) -> float:
        """Seconds until the run ends, at the speed seen so far (infinite before the first step)."""
        lefts = [float("inf")]
        if self.max_steps is not None and step > 0:
            lefts.append((self.max_steps - step) * trained_seconds / step)
        if self.max_tokens is not None and tokens > 0:
            lefts.append((self.max_tokens - tokens) * trained_seconds / tokens)
        if self.max_seconds is not None:
            lefts.append(self.max_seconds - trained_seconds)
        if self.until is not None:
            lefts.append(self.until - self.now())
        return max(0.0, min(lefts))


def parse_until(text: str, now: datetime | None = None) -> float:
    """``HH:MM`` (the next such time, local) or an ISO date and time, as Unix time.

    Raises:
        ConfigError: ``text`` is neither.
    """
    now = now or datetime.now()
    try:
        if len(text) == 5 and text[2] == ":":
            clock = datetime.strptime(text, "%H:%M")
            moment = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
            return (moment if moment > now else moment + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ConfigError(f"until: got {text!r}, expected HH:MM or an ISO date and time") from error


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

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure, which nobody here has
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

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
