"""A decode loop without a model: a drafter with known acceptance, steps with known cost, any controller.

This is the place to try a change of a policy: it is deterministic by seed, has no noise but the one asked for, and its
machines are those that nobody has at hand. ``auto_scenarios`` has the situations that ``auto`` is judged by; write a
controller, or change a setting, and run these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import njit
from dynaspec.contract.costs import PassCosts, runs_model
from dynaspec.contract.step import (
    Controller,
    DraftView,
    Limits,
    ProposerTraits,
    SpecPlan,
    StepOutcome,
    StepView,
    StopRule,
    Work,
)

LONGEST = 16
LIMITS = Limits(draft_lens=tuple(range(LONGEST + 1)), proposers=(ProposerTraits("draft_model"),))
TARGET_MS = ((1, 2.0), (8, 2.3), (16, 3.6), (32, 6.4), (64, 12.0), (512, 92.0))

Floats = npt.NDArray[np.float64]
Load = Callable[[int], int]
"""Step → requests."""


@dataclass(frozen=True)
class Machine:
    """Seconds of everything. The defaults are a small pair on two CPU cores."""

    rows: tuple[tuple[float, float], ...] = tuple((rows, ms / 1e3) for rows, ms in TARGET_MS)
    """A target pass by its rows, linear between these."""
    start: float = 0.15e-3
    draft_pass: float = 0.35e-3
    draft_row: float = 0.012e-3
    host: float = 0.3e-3
    read_in_row: float = 0.012e-3
    """Of a token that the drafter has missed."""
    timed: tuple[int, ...] = (1, 8, 16, 32, 64)
    """Rows at which the host times its passes as it starts."""

    @cached_property
    def _curve(self) -> tuple[Floats, Floats]:
        at, seconds = zip(*self.rows, strict=True)
        return np.array(at, dtype=np.float64), np.array(seconds)

    def pass_s(self, rows: float) -> float:
        at, seconds = self._curve
        if rows <= at[-1]:
            return float(np.interp(rows, at, seconds))
        return float(seconds[-1] + (rows - at[-1]) * (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]))

    def costs(self, mispriced: float = 1.0) -> PassCosts:
        """What a host would measure; ``mispriced`` multiplies what drafting takes."""
        passes = ((1, self.draft_pass + self.draft_row), (16, self.draft_pass + 16 * self.draft_row))
        return PassCosts(
            target=tuple((rows, self.pass_s(rows)) for rows in self.timed),
            drafters=(tuple((rows, mispriced * seconds) for rows, seconds in passes),),
            first_s=(mispriced * self.start,),
            context_s=1e-12,  # context costs nothing here
            read_s=1e-12,
        )


SMALL_PAIR = Machine()
COSTS = SMALL_PAIR.costs()


def target_s(rows: int) -> float:
    return SMALL_PAIR.pass_s(rows)


@dataclass(slots=True)
class Trace:
    """What a run did, step by step; what was lucky is not counted as speed."""

    tokens: list[float] = field(default_factory=list)
    """Expected of the drafts that were verified."""
    seconds: list[float] = field(default_factory=list)
    """Without the noise that the controller sees."""
    lengths: list[float] = field(default_factory=list)
    plans: list[SpecPlan] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def mean_length(self, first: int, end: int) -> float:
        return float(np.mean(self.lengths[first:end]))

    def goodput_of(self, first: int, end: int) -> float:
        return sum(self.tokens[first:end]) / sum(self.seconds[first:end])


def mean_acceptance(quality: float) -> float:
    """Of a token, whoever drafts it."""
    draws = _confidence(np.random.default_rng(0).normal(1.6, 2.0, 200_000))
    return float(np.minimum(1.0, quality * draws**1.2).mean())


def fixed_goodput(machine: Machine, requests: int, chance: float, k: int, traits: ProposerTraits) -> float:
    """Tokens/s that drafts of always k tokens give in the long run."""
    passes = 0 if not k else 1 if traits.passes_per_draft == "one" else k
    idle = traits.idle_pass
    passes = max(passes, 1) if idle else passes
    rows = requests * (1 + k if idle and passes == 1 else passes) if passes else 0
    seconds = machine.pass_s(requests * (1 + k)) + machine.host
    if passes:
        seconds += machine.start + machine.draft_pass * passes + machine.draft_row * rows
    return requests * sum(chance**j for j in range(k + 1)) / seconds


@dataclass(slots=True)
class Loop:
    """Requests run for ever. A token's confidence c is calibrated: it is accepted with chance quality · c^1.2."""

    requests: int | Load
    seed: int = 0
    quality: Callable[[int, int], float] = lambda step, request: 1.0
    confidence: float | None = None
    """Shown instead of the true one."""
    noise: float = 0.1
    limits: Limits = LIMITS
    row_s: float = 0.0
    """What a row of the target takes on top of the machine's."""
    machine: Machine = SMALL_PAIR
    prompt: int = 0
    """Tokens of each request that the drafter has not seen at first."""
    whole: bool = False
    """The host knows a step's seconds only as a whole, as vLLM does."""
    first_id: int = 0
    slowness: Callable[[int], float] = lambda step: 1.0
    """Step → how many times as long as usual all takes."""

    def run(self, controller: Controller, steps: int) -> Trace:
        rng, trace, before = np.random.default_rng(self.seed), Trace(), 0
        lag = np.zeros(0, dtype=np.int64)
        for step in range(steps):
            count = self.requests if isinstance(self.requests, int) else self.requests(step)
            if count != before:  # all are new
                self.first_id += before
                lag, before = np.full(count, self.prompt), count
            view = self.view(step, lag)
            plan = controller.plan(view)
            lens, confidence, chance, right = self._draft(rng, step, plan)
            shown = _first_of_each(confidence, lens)
            trimmed = controller.trim(view, plan, DraftView(tuple(lens.tolist()), shown))
            verified = np.minimum(lens, trimmed.depth)
            tested = np.arange(right.shape[1]) < verified[:, None]
            wrong = ~(right & tested)
            accepted = np.where(wrong.any(axis=1), wrong.argmax(axis=1), verified) if right.shape[1] else verified
            read = np.where((lag > plan.probe_context) & (plan.probe_context > 0), plan.probe_context, lag)
            drawn = np.where(np.array(plan.proposer) == 0, lens, 0)
            read_in = int(read[drawn > 0].sum())
            outcome, seconds = self._outcome(rng, view, plan, lens, drawn, verified, accepted, shown, read_in)
            caught_up = (drawn > 0) & (read == lag)
            lag = np.where(caught_up, 0, lag + accepted + 1)
            controller.observe(outcome)
            self._go_on(accepted + 1)
            trace.tokens.append(count + float((chance.cumprod(axis=1) * tested).sum()))
            trace.seconds.append(seconds)
            trace.lengths.append(float(lens.sum()) / count)
            trace.plans.append(trimmed)
        return trace

    def view(self, step: int, lag: npt.NDArray[np.int64] | list[int]) -> StepView:
        count, lag = len(lag), tuple(np.array(lag, dtype=np.int64).tolist())
        many, none = (10**6,) * count, (0,) * count
        return StepView(
            step=step,
            ids=_names(self.first_id, count),
            context_len=(200 + self.prompt,) * count,
            room_depth=many,
            room_nodes=many,
            max_draft=(None,) * count,
            temperature=(0.0,) * count,
            lag=tuple([lag if runs_model(traits) else none for traits in self.limits.proposers]) or ((),),
            offers=self._offers(count),
            prefill_tokens=0,
            waiting=0,
            limits=self.limits,
        )

    def _offers(self, count: int) -> tuple[tuple[tuple[int, int], ...] | None, ...]:
        """Of each proposer, see ``StepView.offers``."""
        return (None,) * max(1, len(self.limits.proposers))

    def _came_true(self, emitted: npt.NDArray[np.int64]) -> tuple[tuple[tuple[int, int, int], ...] | None, ...]:
        """See ``StepOutcome.came_true``."""
        return ()

    def _go_on(self, emitted: npt.NDArray[np.int64]) -> None:
        """[B] tokens were emitted."""

    def _draft(
        self, rng: np.random.Generator, step: int, plan: SpecPlan
    ) -> tuple[npt.NDArray[np.int64], Floats, Floats, npt.NDArray[np.bool_]]:
        """[B] lengths; [B, longest] confidences, each token's chance to be right, and whether it is."""
        depth = np.array(plan.depth, dtype=np.int64)
        longest = int(depth.max(initial=0))
        shape = (depth.size, longest)
        c = _confidence(rng.normal(1.6, 2.0, shape))
        quality = np.array([self.quality(step, r) for r in range(depth.size)])
        chance = quality[:, None] * c**1.2
        right = rng.random(shape) < chance
        shown = c if self.confidence is None else np.full(shape, self.confidence)
        stops = plan.stop is not None and self.limits.proposers[0].passes_per_draft == "per_token"
        lens = _stopped(plan.stop, depth, shown) if plan.stop is not None and stops else depth
        return lens, shown, chance, right

    def _outcome(
        self,
        rng: np.random.Generator,
        view: StepView,
        plan: SpecPlan,
        lens: npt.NDArray[np.int64],
        drawn: npt.NDArray[np.int64],
        verified: npt.NDArray[np.int64],
        accepted: npt.NDArray[np.int64],
        confidence: tuple[tuple[float, ...], ...],
        read: int,
    ) -> tuple[StepOutcome, float]:
        """And its seconds without noise; ``drawn`` [B] are the tokens that the first proposer has drafted."""
        rows, traits = int(lens.size + verified.sum()), self.limits.proposers[0] if self.limits.proposers else None
        passes = np.bincount(drawn)[:0:-1].cumsum()[::-1].tolist()  # rows that draw token 0, 1, …
        if traits is not None and traits.passes_per_draft == "one":
            passes = passes[:1]
        read_in = read if passes else 0
        if traits is not None and traits.idle_pass:  # over the rows of the target's pass
            passes, read_in = [rows, *passes[1:]], 0
        machine, slowness = self.machine, self.slowness(view.step)
        usual_s = (machine.pass_s(rows) + self.row_s * rows) * slowness
        verify_s = usual_s * max(0.7, rng.normal(1, self.noise))
        draft_s = machine.read_in_row * read_in
        if passes:
            draft_s += machine.start + machine.draft_pass * len(passes) + machine.draft_row * sum(passes)
            passes[0] += read_in
        draft_s *= slowness
        rest_s = draft_s + machine.host * slowness
        counts = {"requested": plan.depth, "early_exit": tuple((lens < plan.depth).tolist())}
        outcome = StepOutcome(
            plan_step=view.step,
            ids=view.ids,
            proposer=plan.proposer,
            drafted=tuple(lens.tolist()),
            verified=tuple(verified.tolist()),
            accepted=tuple(accepted.tolist()),
            emitted=tuple((accepted + 1).tolist()),
            ended=tuple(_ENDED[np.where(lens == 0, 0, np.where(accepted < verified, 1, 2))].tolist()),
            confidence=confidence,
            work=Work(rows_per_pass=tuple(passes), verify_rows=rows, kv_tokens=rows * view.context_len[0]),
            draft_s=0.0 if self.whole else draft_s,
            verify_s=0.0 if self.whole else verify_s,
            step_s=rest_s + verify_s,
            came_true=self._came_true(accepted + 1),
            **counts,  # type: ignore[arg-type]
        )
        return outcome, rest_s + usual_s


def with_traits(traits: ProposerTraits, limits: Limits = LIMITS) -> Limits:
    """A host whose proposer has these."""
    return replace(limits, proposers=(traits,))


@cache
def _names(first: int, count: int) -> tuple[str, ...]:
    return tuple(map(str, range(first, first + count)))


def _first_of_each(table: Floats, lens: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], ...]:
    """The first ``lens`` [B] entries of each row."""
    if not lens.any():
        return ((),) * lens.size
    return tuple([tuple(row[:n]) for row, n in zip(table.tolist(), lens.tolist(), strict=True)])


_ENDED: npt.NDArray[np.object_] = np.array(["none", "rejected", "all_accepted"], dtype=object)


def _confidence(z: Floats) -> Floats:
    return np.asarray(0.05 + 0.95 / (1 + np.exp(-z)))


def _stopped(rule: StopRule, depth: npt.NDArray[np.int64], shown: Floats) -> npt.NDArray[np.int64]:
    """[B] lengths at which the rule ends drafts."""
    offset = np.array(rule.offset) if rule.offset else np.zeros(depth.size)
    columns = (np.array(column) for column in (rule.bias or (0.0,), rule.below, rule.total_below))
    return np.asarray(_ends(depth, shown, rule.weight, offset, *columns, rule.signal == "survival"))


@njit(cache=True)
def _ends(
    depth: npt.NDArray[np.int64],
    shown: Floats,
    weight: float,
    offset: Floats,
    bias: Floats,
    below: Floats,
    total_below: Floats,
    by_survival: bool,
) -> npt.NDArray[np.int64]:
    lens, running, survival = depth.copy(), depth > 0, np.ones(depth.size)
    for j in range(shown.shape[1]):
        margin, going = 0.0, 0
        for r in range(depth.size):
            running[r] &= depth[r] > j
            if not running[r]:
                continue
            c = min(max(shown[r, j], 0.0025), 0.9975)
            z = weight * np.log(c / (1.0 - c)) + bias[min(j, bias.size - 1)] + offset[r]
            survival[r] /= 1.0 + np.exp(-z)
            over = (survival[r] if by_survival else shown[r, j]) - below[min(j, below.size - 1)]
            if over < 0.0:
                lens[r], running[r] = j + 1, False
            elif depth[r] > j + 1:
                margin, going = margin + over, going + 1
        if total_below.size and going and margin < total_below[min(j, total_below.size - 1)]:
            lens[running] = j + 1
            break
    return lens
