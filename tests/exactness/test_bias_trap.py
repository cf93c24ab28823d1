"""Trimming drafts must not look at what it cuts off: trims that do are biased, the production trims are not.

Whether a drafted token is verified may depend on the tokens before it, on their confidences and its own (a function of
the tokens before it), and on other requests. Two checks: a chi-square test of what is emitted, which the classic
faults fail; and, far more sensitive, the same trim called with other confidences behind the token in question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.step import Controller, DraftView, Limits, SpecPlan, StepView
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.registry import build_controller
from exactness.controlled import (
    DRAFT_PASS_S,
    PASS_S,
    ROW_S,
    Controlled,
    cut,
    limits_for,
    outcome_of,
    signal_of,
    stopped,
    view_of,
)
from exactness.toy import ABSURD, PLAUSIBLE, REQUESTS, Decoder, World, p_value

COOL = {"temperature": 0.5}
WORLDS = {
    "all known": World.random(2, params=COOL),
    "a part known": World.random(5, params=COOL, known=(0, 1, 2, 3)),
}
"""By what the drafter knows: all tokens, as a draft model does, or some, as a head."""
SHARP = World.random(2).target * np.float32([[0.2], [0.5], [1.0], [2.0], [4.0]])
PAIR = World(SHARP, SHARP + World.random(3, spread=0.8).target)
"""A drafter that pays and knows when: after some tokens both are sure what follows, after others they guess."""
DEPTH = 4

# --- broken trims ---------------------------------------------------------------------------------------------


class DropsAToken(Decoder):
    """Does not verify from token 2 on, because it is token 2."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        return first_true(drafts.tokens == 2)


class DropsTheUnlikely(Decoder):
    """Does not verify a drafted token of low probability."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        assert drafts.q is not None
        drawn = drafts.q.gather(-1, torch.from_numpy(drafts.tokens)[:, :, None])[:, :, 0].numpy()
        return first_true(drawn < 0.25)


class LooksAhead(Decoder):
    """Verifies nothing unless the second drafted token is a promising one, which depends on the first."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        return np.where(np.isin(drafts.tokens[:, 1], (0, 1)), self.depth, 0)


COSTS = np.array([1.0, 1.7, 1.7, 1.75, 1.8])
"""Seconds of a target pass by drafted tokens in it: the first is dear, as where a tile of rows begins."""


def goodput(drafts: Drafts) -> np.ndarray:
    """[B, K + 1] expected tokens a second of verifying 0 … K drafts, if confidence is the chance of acceptance."""
    assert drafts.confidence is not None
    survival = drafts.confidence.cumprod(-1)
    tokens = np.concatenate([np.ones((len(survival), 1)), 1.0 + survival.cumsum(-1)], 1)
    rates: np.ndarray = tokens / COSTS[: tokens.shape[1]]
    return rates


class TakesTheBestBudget(Decoder):
    """Verifies as much as promises the best goodput of all budgets: a sure third token can save the first."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        best: np.ndarray = goodput(drafts).argmax(-1)
        return best


class StopsAtTheFirstLoss(Decoder):
    """Not faulty, the same with foresight left out: stops before the first token that lowers the goodput."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        rates = goodput(drafts)
        return first_true(rates[:, 1:] < rates[:, :-1])


class StopsWhenUnsure(Decoder):
    """Not faulty: stops behind a token of low confidence, and verifies that token too."""

    def verified(self, drafts: Drafts) -> np.ndarray:
        assert drafts.q is not None
        return np.minimum(first_true(drafts.q.amax(-1).numpy() < 0.5) + 1, self.depth)


def first_true(where: np.ndarray) -> np.ndarray:
    """[B] the first true column, or the number of columns."""
    return np.where(where.any(-1), where.argmax(-1), where.shape[1])


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("broken", [DropsAToken, DropsTheUnlikely, LooksAhead, TakesTheBestBudget])
def test_a_trim_that_looks_at_what_it_cuts_off_is_caught(broken: type[Decoder], world: World) -> None:
    assert p_value(Decoder(world, REQUESTS, DEPTH)) > PLAUSIBLE
    assert p_value(broken(world, REQUESTS, DEPTH)) < ABSURD


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("causal", [StopsAtTheFirstLoss, StopsWhenUnsure])
def test_the_same_without_foresight_passes(causal: type[Decoder], world: World) -> None:
    assert p_value(causal(world, REQUESTS, DEPTH)) > PLAUSIBLE


def test_the_half_and_half_example() -> None:
    """p = q = (½, ½), token 1 dropped because it is token 1: the output becomes (¾, ¼)."""

    class DropsTokenOne(Decoder):
        def verified(self, drafts: Drafts) -> np.ndarray:
            return first_true(drafts.tokens == 1)

    world = World(np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32))
    first = DropsTokenOne(world, REQUESTS, 1).run(1)[:, 0]
    assert abs(first.mean() - 0.25) < 0.02
    assert abs(Decoder(world, REQUESTS, 1).run(1)[:, 0].mean() - 0.5) < 0.02


# --- production trims -----------------------------------------------------------------------------------------

POLICIES: dict[str, dict[str, Any]] = {
    "constant": {"policy": "constant", "num_speculative_tokens": DEPTH},
    "confidence_request": {"draft_confidence_threshold": 0.6, "draft_confidence_scope": "request"},
    "confidence_batch_mean": {"draft_confidence_threshold": 0.6, "draft_confidence_scope": "batch_mean"},
    "confidence_token_prob": {
        "draft_confidence_threshold": 0.4,
        "draft_confidence_scope": "request",
        "signal": "token_prob",
    },
    "auto": {"policy": "auto"},
}
BATCH = 6


DEAR_ROW_S = 2e-3
"""A price of the target's rows at which a draft's last token may not be worth its own."""


def build(policy: str, limits: Limits, row_s: float = ROW_S) -> Controller:
    config = SpeculativeConfig(model="toy", **{"num_speculative_tokens": DEPTH, **POLICIES[policy]})
    target = tuple((rows, PASS_S + row_s * rows) for rows in (1, 8, 64))
    drafter = tuple((rows, DRAFT_PASS_S) for rows in (1, 64))
    return build_controller(config, limits, costs=PassCosts(target, (drafter,)))


@pytest.mark.parametrize("known", [None, (0, 2, 3)], ids=["all known", "a part known"])
@pytest.mark.parametrize(
    ("policy", "budget"), [*((name, BATCH + 7) for name in POLICIES), ("auto", None), ("confidence_token_prob", None)]
)
def test_production_trims_keep_the_targets_distribution(
    policy: str, budget: int | None, known: tuple[int, ...] | None
) -> None:
    limits, world = limits_for(DEPTH, budget), replace(PAIR, known=known)
    controller = build(policy, limits)
    if policy == "auto":
        Controlled(world, 600, controller, limits, batch=BATCH).run(12)  # until it knows what it does
    decoder = Controlled(world, REQUESTS, controller, limits, batch=BATCH, first_seed=1_000_000)
    assert p_value(decoder) > PLAUSIBLE
    assert decoder.drafted > decoder.accepted > 0
    if policy.startswith("confidence"):  # without a stop rule, drafts are cut to the budget before they are drawn
        assert (decoder.trimmed > 0) == (budget is not None)


@pytest.mark.parametrize("budget", [None, BATCH + 4])
def test_what_a_token_says_of_itself_decides_only_what_follows_it(budget: int | None) -> None:
    """Evidence depends on which token was drawn, and ``auto`` relies on it."""
    limits = limits_for(DEPTH, budget)
    controller = build("auto", limits, DEAR_ROW_S)
    world: dict[str, Any] = {"batch": BATCH, "repeat_bonus": 2.0, "row_s": DEAR_ROW_S}
    Controlled(PAIR, 600, controller, limits, **world).run(12)
    decoder = Controlled(PAIR, REQUESTS, controller, limits, first_seed=1_000_000, **world)
    assert p_value(decoder) > PLAUSIBLE
    assert decoder.drafted > decoder.accepted > 0
    assert decoder.trimmed > 0


# --- causality, call by call ----------------------------------------------------------------------------------

Trim = Callable[..., np.ndarray]
"""Confidences [B, K] of what would be drafted → [B] verified lengths."""


def confidences(rng: np.random.Generator) -> np.ndarray:
    """[B, K] of requests that are easy, hard, even or fickle."""
    kinds = rng.choice([0.3, 1.0, 3.0, 9.0], (2, BATCH, 1))
    drawn: np.ndarray = rng.beta(*kinds, (BATCH, DEPTH)).clip(0.01, 0.99).astype(np.float32)
    return drawn


def violations(trim: Trim, own: bool, trials: int, seed: int = 0) -> int:
    """How often another confidence behind a token changes whether that token is verified.

    Args:
        own: the token's own confidence may be looked at: it was known before the token was drawn.
    """
    rng, found = np.random.default_rng(seed), 0
    for _ in range(trials):
        confidence = confidences(rng)
        lens = trim(confidence)
        for request in range(BATCH):
            slot = int(rng.integers(DEPTH))
            other = confidence.copy()
            other[request, slot + own :] = rng.uniform(0.01, 0.99, DEPTH - slot - own)
            found += int((trim(other)[request] > slot) != (lens[request] > slot))
    return found


def trim_of(controller: Controller, view: StepView, plan: SpecPlan) -> Trim:
    """Drafting under the plan's stop rule, then the controller's trim."""

    def trim(confidence: np.ndarray, repeat_bonus: np.ndarray | None = None) -> np.ndarray:
        own = np.zeros_like(confidence) if repeat_bonus is None else repeat_bonus
        signal = signal_of(plan, confidence, own)
        lens = stopped(plan, signal)
        told = plan.stop is not None and plan.stop.signal == "survival"
        columns = (cut(signal, lens), cut(own, lens)) if told else ()
        depth = controller.trim(view, plan, DraftView(tuple(lens.tolist()), cut(confidence, lens), *columns)).depth
        return np.minimum(np.array(depth), lens)

    return trim


def convinced(policy: str, budget: int | None, row_s: float = ROW_S) -> Controller:
    """A controller that has seen drafts whose confidence is just their chance of acceptance, so that it relies on it.

    In the toy world confidence says little, which would leave ``auto`` little to look ahead at.
    """
    limits, rng = limits_for(DEPTH, budget), np.random.default_rng(0)
    controller = build(policy, limits, row_s)
    for step in range(1, 201):
        view = view_of(step, tuple(f"{step}-{i}" for i in range(BATCH)), limits)
        plan, confidence = controller.plan(view), confidences(rng)
        lens = stopped(plan, signal_of(plan, confidence, np.zeros_like(confidence)))
        shown = cut(confidence, lens)
        verified = np.array(controller.trim(view, plan, DraftView(tuple(lens.tolist()), shown)).depth)
        accepted = np.minimum(first_true(rng.random(confidence.shape) > confidence), verified)
        controller.observe(outcome_of(view, plan, lens, verified, accepted, shown, row_s))
        controller.forget(view.ids)
    return controller


def drafting_plans(controller: Controller, limits: Limits, count: int) -> list[tuple[StepView, SpecPlan]]:
    """The next plans that draft: plain decoding trims nothing."""
    views = (view_of(step, tuple(f"new-{step}-{i}" for i in range(BATCH)), limits) for step in range(1, 1000))
    plans = ((view, controller.plan(view)) for view in views)
    found = list(islice(((view, plan) for view, plan in plans if any(plan.depth)), count))
    assert len(found) == count
    return found


@pytest.mark.parametrize("budget", [None, BATCH + 7, BATCH + 3], ids=["ample", "tight", "tighter"])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name.startswith("confidence") or name == "auto"])
def test_no_production_trim_depends_on_what_it_cuts_off(policy: str, budget: int | None) -> None:
    controller, limits = convinced(policy, budget), limits_for(DEPTH, budget)
    for view, plan in drafting_plans(controller, limits, 3):
        own = plan.stop is None or plan.stop.signal != "token_prob"
        assert violations(trim_of(controller, view, plan), own, trials=150, seed=view.step) == 0


@pytest.mark.parametrize("budget", [None, BATCH + 7], ids=["ample", "tight"])
def test_auto_never_verifies_a_token_because_it_is_that_token(budget: int | None) -> None:
    controller, limits = convinced("auto", budget, DEAR_ROW_S), limits_for(DEPTH, budget)
    rng, decided = np.random.default_rng(7), 0
    for view, plan in drafting_plans(controller, limits, 3):
        trim = trim_of(controller, view, plan)
        for _ in range(150):
            confidence, repeat_bonus = confidences(rng), rng.choice([-2.0, 2.0], (BATCH, DEPTH)).astype(np.float32)
            request, slot = int(rng.integers(BATCH)), int(rng.integers(DEPTH))
            other = repeat_bonus.copy()
            other[request, slot:] *= -1
            lens, changed = trim(confidence, repeat_bonus), trim(confidence, other)
            assert (lens[request] > slot) == (changed[request] > slot)
            decided += int((lens != changed).any())
    assert decided > 0  # it does make a difference behind the token


def test_the_call_by_call_check_catches_foresight() -> None:
    def best_budget(confidence: np.ndarray) -> np.ndarray:
        lens: np.ndarray = goodput(Drafts(np.zeros_like(confidence), np.zeros(0), confidence)).argmax(-1)
        return lens

    def drops_the_unlikely(confidence: np.ndarray) -> np.ndarray:
        return first_true(confidence < 0.5)

    assert violations(best_budget, own=True, trials=60) > 0
    assert violations(drops_the_unlikely, own=False, trials=60) > 0
    assert violations(drops_the_unlikely, own=True, trials=60) == 0


def test_a_planner_cuts_a_batch_by_position_whatever_the_confidences() -> None:
    limits = limits_for(DEPTH, BATCH + 7)
    planner = ChainPlanner(limits)
    view = view_of(3, tuple("abcdef"), limits)
    plan = planner.plan(view, [DEPTH] * BATCH)
    rng = np.random.default_rng(0)
    found = {
        planner.trim(view, plan, DraftView((DEPTH,) * BATCH, tuple(map(tuple, rng.random((BATCH, DEPTH)))))).depth
        for _ in range(20)
    }
    assert len(found) == 1
