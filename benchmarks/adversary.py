"""What a useless drafter costs, and how fast a policy notices that a drafter has become useless, or useful again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from dynaspec.bench.decoders import ClosedLoop, SharedModels, StepTrace, Wrap, open_engine
from dynaspec.bench.offline import lower_bound
from dynaspec.bench.profile_session import Wrapped
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints, Proposer
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import LOGIT_RANGE, SpecPlan
from dynaspec.control.policies.short_names import PLAIN, PolicySpec, parse_policy
from dynaspec.engine.engine import Engine
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.pictures import GREEN, RED, new_figure, save_png, tidy
from dynaspec.propose.stopping import stop_mask
from dynaspec.result_output import Tell
from study import endless, warm_prompts

CONFIDENT = 0.98
"""What an adversarial drafter says of each of its tokens."""
STEPS = 400
MOST_COST = 0.03
"""Of plain decoding's speed."""
USEFUL, USELESS = 100, 200
"""Steps that the drafter is as good as it is, and then of no use, before it is good again."""
WATCHED = slice(130, 160)
"""Steps 131 to 160, counted from 1: by then it must have been noticed."""
MOST_DRAFTED = 0.5
"""Mean draft length in them."""
_RECOVERY_STEPS = 300
_RECOVERY_WINDOW = 30
_REQUEST_TOKENS = 128
_TURN = 20
"""Steps of one side before the other goes on."""


class Adversarial(Wrapped):
    """A real drafter's cost, for nothing: its tokens are replaced by random ones, of which it claims to be sure.

    It drafts as long as a drafter does that is so sure of itself: a stop rule sees what it claims. For greedy decoding,
    as the distributions that drafts were drawn from are dropped.
    """

    def __init__(self, inner: Proposer, vocab_size: int, *, seed: int = 0) -> None:
        super().__init__(inner)
        self.active = True
        """False: the drafter is as good as it ever was."""
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        if not self.active:
            return self.inner.propose(batch, plan)
        granted = np.array(plan.depth, dtype=np.int64)
        lens = lengths_when_sure(plan, CONFIDENT)
        drafts = self.inner.propose(batch, replace(plan.with_depth(tuple(lens.tolist())), stop=None))
        drafted = np.arange(drafts.tokens.shape[1]) < drafts.lens[:, None]
        # Never the token that the drafter means, which may well be right.
        other = self._random.integers(1, self._vocab_size, drafts.tokens.shape)
        drafts.tokens = np.where(drafted, (drafts.tokens + other) % self._vocab_size, 0)
        if drafts.confidence is not None:
            drafts.confidence = np.where(drafted, np.float32(CONFIDENT), drafts.confidence)
        drafts.early_exit = (lens < granted) & (drafts.lens == lens)
        drafts.q = None
        return drafts


def lengths_when_sure(plan: SpecPlan, confidence: float) -> Ints:
    """[B] how far a plan lets a drafter go that says ``confidence`` of each of its tokens."""
    depth = np.array(plan.depth, dtype=np.int64)
    drafting = np.flatnonzero(depth)
    if depth.max(initial=0) <= 1:
        return depth  # a rule is asked after a token
    rule = None if plan.stop is None else plan.stop.select(drafting.tolist())
    mask = stop_mask(rule, depth[drafting], torch.device("cpu"))
    signal = confidence
    if rule is not None and rule.signal == "survival":
        signal = min(math.log(confidence / (1.0 - confidence)), LOGIT_RANGE)
    running = np.arange(drafting.size)
    for done in range(1, int(depth.max()) + 1):
        mask.update(done, running, torch.full((running.size,), signal))
        running = mask.running(done)
        if not running.size:
            break
    lengths = depth.copy()
    lengths[drafting] = mask.lengths()
    return lengths


@dataclass(frozen=True, slots=True)
class AdversaryCost:
    """The same number of steps, side by side."""

    plain_s: tuple[float, ...]
    """Seconds a token, in each round."""
    policy_s: tuple[float, ...]
    mean_draft: tuple[float, ...]
    """Drafted per request and step, in each round."""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Speed of the policy over plain decoding's, in tokens per second, round by round."""
        return tuple(p / a for p, a in zip(self.plain_s, self.policy_s, strict=True))

    @property
    def cost(self) -> float:
        """Share of plain decoding's speed that is lost, in the median."""
        return 1.0 - median(self.ratios)

    @property
    def worst(self) -> float:
        """95 % upper bound of the cost."""
        return 1.0 - lower_bound(self.ratios)


@dataclass(frozen=True, slots=True)
class Drift:
    """Draft length over the steps of one request after the other, while the drafter changes."""

    drafted: tuple[float, ...]
    """Mean draft length of each step."""

    @property
    def watched(self) -> float:
        """Mean over steps 131 to 160."""
        part = self.drafted[WATCHED]
        return sum(part) / len(part)

    @property
    def recovered_after(self) -> int | None:
        """Steps from when it is good again until drafts are half as long as at first, over 30 steps; None: never."""
        before = self.drafted[USEFUL // 2 : USEFUL]
        enough = 0.5 * sum(before) / len(before)
        start = USEFUL + USELESS
        for end in range(start + _RECOVERY_WINDOW, len(self.drafted) + 1):
            part = self.drafted[end - _RECOVERY_WINDOW : end]
            if sum(part) / len(part) >= enough:
                return end - start
        return None


def adversarial(vocab_size: int, kept: list[Adversarial]) -> Callable[[Proposer], Proposer]:
    """For ``open_engine``: makes every proposer adversarial, and keeps them so that they can be switched."""

    def wrap(proposer: Proposer) -> Proposer:
        kept.append(Adversarial(proposer, vocab_size))
        return kept[-1]

    return wrap


def measure_cost(
    model: str,
    draft_model: str,
    prompts: Sequence[str],
    progress: Tell,
    *,
    policy: str = "auto",
    rounds: int = 7,
    concurrency: int = 1,
) -> AdversaryCost:
    """400 steps of plain decoding against 400 of a policy that has just started, with an adversarial drafter; in turns
    of ``_TURN`` steps, so that both meet the same machine.

    What the policy needs to find out that the drafter is of no use is part of the cost.
    """
    load = SharedModels()
    plain = _open(model, PolicySpec(PLAIN, None), concurrency, load)
    spec = parse_policy(policy, draft_model)
    plain_s: list[float] = []
    policy_s: list[float] = []
    drafted: list[float] = []
    try:
        for turn in range(rounds):
            engine = _open(model, spec, concurrency, load, adversarial(plain.tokenizer.vocab_size, []))
            try:
                runs = [_Run(plain, prompts, concurrency), _Run(engine, prompts, concurrency)]
                for done in range(0, STEPS, _TURN):
                    for run in runs if (turn + done // _TURN) % 2 == 0 else runs[::-1]:
                        run.go_on(min(_TURN, STEPS - done))
                for run, seconds in zip(runs, (plain_s, policy_s), strict=True):
                    run.close()
                    # Tokens, not steps: a lucky guess may be accepted.
                    tokens = sum(step.counts.emitted for step in run.trace)
                    seconds.append(sum(step.seconds for step in run.trace) / tokens)
                drafted.append(sum(map(_draft_length, runs[1].trace)) / STEPS)
            finally:
                engine.close()
            progress("adversarial drafter", turn + 1, rounds)
    finally:
        plain.close()
    return AdversaryCost(tuple(plain_s), tuple(policy_s), tuple(drafted))


def measure_drift(
    model: str, draft_model: str, prompts: Sequence[str], progress: Tell, *, policy: str = "auto"
) -> Drift:
    """A drafter that is good for 100 steps, useless for 200, then good again."""
    kept: list[Adversarial] = []
    wrap = adversarial(Tokenizer(model).vocab_size, kept)
    engine = _open(model, parse_policy(policy, draft_model), 1, SharedModels(), wrap)
    if not kept:
        raise ConfigError(f"the policy {policy!r} drafts nothing; expected one that does")

    def at_step(step: int) -> None:
        for drafter in kept:
            drafter.active = USEFUL <= step < USEFUL + USELESS

    try:
        total = USEFUL + USELESS + _RECOVERY_STEPS
        at_step(0)
        run = _Run(engine, prompts, 1)
        for step in range(total):
            at_step(step)
            run.go_on(1)
        run.close()
    finally:
        engine.close()
    progress("drift", 1, 1)
    return Drift(tuple(map(_draft_length, run.trace)))


def _open(model: str, spec: PolicySpec, concurrency: int, load: SharedModels, wrap: Wrap | None = None) -> Engine:
    return open_engine(model, spec, wrap=wrap, load=load, max_num_seqs=concurrency)


class _Run:
    """An engine kept busy, and its steps in which requests decode; prompts come from the prefix cache."""

    def __init__(self, engine: Engine, prompts: Sequence[str], concurrency: int) -> None:
        encoded = [tuple(engine.tokenizer.encode(prompt)) for prompt in prompts]
        warm_prompts(engine, encoded, concurrency, max_draft_tokens=0)  # nothing is learnt of the drafter
        params = SamplingParams(temperature=0, max_tokens=_REQUEST_TOKENS, ignore_eos=True, detokenize=False)
        self._loop = ClosedLoop(engine, endless(encoded, params, 0), concurrency)
        self.trace: list[StepTrace] = []

    def go_on(self, steps: int) -> None:
        """So many steps more."""
        enough = len(self.trace) + steps
        while len(self.trace) < enough:
            step = self._loop.step()
            if step is not None and step.counts.request_steps:
                self.trace.append(step)

    def close(self) -> None:
        self._loop.close()


def _draft_length(step: StepTrace) -> float:
    return step.counts.draft_tokens / step.counts.request_steps


_SMOOTH = 10


def lines(cost: AdversaryCost, drift: Drift, policy: str) -> list[str]:
    """What was measured, against what is expected."""
    back = "never" if drift.recovered_after is None else f"after {drift.recovered_after} steps"
    return [
        f"An adversarial drafter costs {policy} {100 * cost.cost:.1f} % of plain decoding's speed over 400 steps "
        f"(at most {100 * cost.worst:.1f} % at 95 %); expected at most {100 * MOST_COST:.0f} %: "
        f"{_verdict(cost.cost <= MOST_COST)}",
        f"A drafter that is useless from step {USEFUL} on: mean draft length {drift.watched:.2f} in steps 131 to 160; "
        f"expected at most {MOST_DRAFTED}: {_verdict(drift.watched <= MOST_DRAFTED)}",
        f"Good again from step {USEFUL + USELESS} on: drafts are half as long as at first {back}: "
        f"{_verdict(drift.recovered_after is not None)}",
    ]


def as_document(cost: AdversaryCost, drift: Drift) -> dict[str, Any]:
    return {
        "ratio_rounds": list(cost.ratios),
        "cost": cost.cost,
        "cost_upper_bound": cost.worst,
        "mean_draft_rounds": list(cost.mean_draft),
        "mean_draft_watched": drift.watched,
        "recovered_after_steps": drift.recovered_after,
        "drafted": list(drift.drafted),
    }


def plot_drift(drift: Drift, path: Path, policy: str) -> None:
    """Writes a PNG: the draft length of every step, and its mean over ten.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = new_figure(10, 3.2, f"{policy}: a drafter that is useless for a while")
    ax = figure.subplots()
    steps = np.arange(1, len(drift.drafted) + 1)
    ax.axvspan(USEFUL, USEFUL + USELESS, color=RED, alpha=0.1, label="useless")
    ax.plot(steps, drift.drafted, ".", color=GREEN, alpha=0.35, markersize=3)
    ax.plot(
        steps[_SMOOTH - 1 :],
        np.convolve(drift.drafted, np.full(_SMOOTH, 1 / _SMOOTH), "valid"),
        color=GREEN,
        linewidth=1.8,
        label=f"mean over {_SMOOTH} steps",
    )
    ax.legend(frameon=False, fontsize=8.5)
    tidy(ax, "Draft length", "step", "tokens")
    save_png(figure, path)


def _verdict(good: bool) -> str:
    return "reached" if good else "MISSED"
