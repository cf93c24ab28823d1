"""Synthetic acceptance traces: acceptance from a Beta distribution, confidences that tell of it as much as asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dynaspec.contract.errors import ConfigError

from .traces import PADDING, Floats, Ints, Trace, build_trace, runs_by_reach, runs_of

_EDGE = 1e-4
"""Request rates are kept this far from 0 and 1, where a logit ends."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal token counts, rounded, at least 1.

    Raises:
        ConfigError: a mean below 1 or a negative spread.
    """

    mean: float
    spread: float = 0.0
    """Standard deviation of the logarithm; 0 = all alike, about 1 = the long tail of RL rollouts."""
    longest: int | None = None
    """Cut here."""

    def __post_init__(self) -> None:
        if not self.mean >= 1 or not math.isfinite(self.mean):
            raise ConfigError(f"a mean length is {self.mean}; expected at least 1 token")
        if not 0.0 <= self.spread <= 4.0:
            raise ConfigError(f"a length spread is {self.spread}; expected a number from 0 to 4")

    def draw(self, count: int, rng: np.random.Generator) -> Ints:
        # The mean of a lognormal is exp(μ + σ²/2).
        values = rng.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(np.rint(values), 1, self.longest).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """How a synthetic trace is drawn.

    Each request has a conditional acceptance a ~ Beta(m·c, (1 − m)·c), each of its tokens is accepted with chance a,
    independent of the others. The drafter's confidence is c = σ(logit a + d·x), with x ~ N(±d/2, 1) for tokens that
    are accepted or not: by Bayes' rule exactly the chance of acceptance given x (the equal-variance binormal model of
    signal detection), so the confidence is calibrated, and d sets how well it tells the two apart.

    Raises:
        ConfigError: a value out of range.
    """

    requests: int
    acceptance: tuple[float, ...] = (0.7,)
    """m of each phase; the requests fall into phases of equal size, in the order of arrival."""
    concentration: float = 12.0
    """c: how alike the requests are; large = all have the mean."""
    decay: float = 1.0
    """Conditional acceptance of slot j is a·decay^(j − 1): 1 for a language model, below 1 for parallel heads."""
    auc: float = 0.8
    """Chance, within a request, that an accepted token has more confidence than a rejected one; 0.5 = no signal."""
    noise: float = 0.0
    """Standard deviation of noise in the confidence's logit. The AUC stays, calibration suffers."""
    prompt: Lengths = Lengths(512, 0.5)
    output: Lengths = Lengths(256, 0.5)
    max_tokens: int | None = None
    """What callers allow; None: the longest output of the trace."""

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"requests is {self.requests}; expected at least 1")
        for mean in self.acceptance:
            if not 0.0 <= mean <= 1.0:
                raise ConfigError(f"acceptance is {mean}; expected a number from 0 to 1")
        if not 0 < len(self.acceptance) <= self.requests:
            raise ConfigError(f"acceptance has {len(self.acceptance)} phases for {self.requests} requests")
        for name, value, low, high in (
            ("concentration", self.concentration, 0.1, 1e6),
            ("decay", self.decay, 0.01, 1.0),
            ("auc", self.auc, 0.5, 0.999),
            ("noise", self.noise, 0.0, 10.0),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}; expected a number from {low} to {high:g}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; expected at least 1")

    def draw(self, rng: np.random.Generator) -> Trace:
        """A trace; the same generator state gives the same trace."""
        prompt = self.prompt.draw(self.requests, rng)
        output = self.output.draw(self.requests, rng)
        if self.max_tokens is not None:
            output = np.minimum(output, self.max_tokens)
        rate = np.repeat(self._rates(rng), output)
        accepted, reach = self._fates(rate, rng)
        runs = runs_of(accepted, output) if self.decay == 1.0 else runs_by_reach(reach, output)
        strays, _ = self._fates(rate, rng)
        return build_trace(
            prompt,
            output,
            runs,
            max_tokens=np.full(self.requests, self.max_tokens or int(output.max())),
            confidence=self._confidence(rate, accepted, rng),
            stray=self._confidence(rate, strays, rng),
        )

    def _rates(self, rng: np.random.Generator) -> Floats:
        """[N] each request's conditional acceptance."""
        phase = np.arange(self.requests) * len(self.acceptance) // self.requests
        mean = np.array(self.acceptance)[phase]
        inner = np.clip(mean, _EDGE, 1 - _EDGE)
        drawn = rng.beta(inner * self.concentration, (1 - inner) * self.concentration)
        # A phase of 0 or 1 means just that, for closed-form checks and adversaries.
        return np.where((mean == 0.0) | (mean == 1.0), mean, drawn)

    def _fates(self, rate: Floats, rng: np.random.Generator) -> tuple[npt.NDArray[np.bool_], Ints]:
        """For each position whether its token is accepted in slot 1, and the deepest slot in which it is."""
        u = rng.random(len(rate))
        accepted = u < rate
        if self.decay == 1.0:
            return accepted, np.where(accepted, PADDING, 0)
        with np.errstate(divide="ignore"):
            deepest = np.floor(np.log(u / np.maximum(rate, 1e-300)) / math.log(self.decay)) + 1
        return accepted, np.where(accepted, np.clip(deepest, 1, PADDING), 0).astype(np.int64)

    def _confidence(self, rate: Floats, accepted: npt.NDArray[np.bool_], rng: np.random.Generator) -> Floats:
        inner = np.clip(rate, _EDGE, 1 - _EDGE)
        d = separation(self.auc, self.noise)
        x = np.where(accepted, d / 2, -d / 2) + rng.standard_normal(len(rate))
        logit = np.log(inner / (1 - inner)) + d * x + self.noise * rng.standard_normal(len(rate))
        result: Floats = 1.0 / (1.0 + np.exp(-logit))
        return result


def separation(auc: float, noise: float) -> float:
    """d for which d·x + noise·ε has this AUC, with x ~ N(±d/2, 1): AUC = Φ(d² / √(2(d² + noise²)))."""
    q = NormalDist().inv_cdf(auc) * math.sqrt(2)
    return math.sqrt((q**2 + q * math.sqrt(q**2 + 4 * noise**2)) / 2)
