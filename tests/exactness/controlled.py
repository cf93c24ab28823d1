"""A controller's whole say in the toy world: plan, stop rule, trim and what it learns, in small batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.step import (
    LOGIT_RANGE,
    Controller,
    DraftView,
    Ended,
    Limits,
    ProposerTraits,
    SpecPlan,
    StepOutcome,
    StepView,
    Work,
)
from dynaspec.propose.stopping import stop_mask
from exactness.toy import Decoder, World

PASS_S, ROW_S = 20e-3, 6e-4
DRAFT_PASS_S = 1e-3
"""The toy world's clock: seconds of a target pass, of each of its rows, and of a drafter pass. So long that looking at
drafts before they are verified is worth its while."""

CPU = torch.device("cpu")


def limits_for(depth: int, verify_budget: int | None = None) -> Limits:
    return Limits(tuple(range(depth + 1)), (ProposerTraits("toy"),), verify_budget=verify_budget)


def view_of(step: int, ids: tuple[str, ...], limits: Limits) -> StepView:
    """Decoding requests with all the room they may want."""
    size, depth = len(ids), limits.draft_lens[-1]
    return StepView(
        step=step,
        ids=ids,
        context_len=(10,) * size,
        room_depth=(depth,) * size,
        room_nodes=(depth,) * size,
        max_draft=(None,) * size,
        temperature=(1.0,) * size,
        lag=((0,) * size,),
        offers=(None,),
        prefill_tokens=0,
        waiting=0,
        limits=limits,
    )


def stopped(plan: SpecPlan, signal: np.ndarray) -> np.ndarray:
    """[B] draft lengths under the plan's stop rule, evaluated by the drafter's own code.

    Args:
        signal: [B, K] float32 of what the drafter would draft if nothing stopped it.
    """
    depth = np.array(plan.depth, np.int64)
    lens, active = np.zeros_like(depth), np.flatnonzero(depth)
    if not active.size:
        return lens
    rule = None if plan.stop is None else plan.stop.select(active.tolist())
    mask = stop_mask(rule, depth[active], CPU)
    rows, done = np.arange(active.size), 0
    while rows.size:
        done += 1
        mask.update(done, rows, torch.from_numpy(signal[active[rows], done - 1]))
        rows = mask.running(done)
    lens[active] = mask.lengths()
    return lens


def signal_of(plan: SpecPlan, confidence: np.ndarray, repeat_bonus: np.ndarray) -> np.ndarray:
    """[B, K] float32 what a proposer shows the stop rule: the confidence, or its logit and the repeat bonus.

    Args:
        repeat_bonus: [B, K] what being just this token adds.
    """
    if plan.stop is None or plan.stop.signal != "survival":
        return confidence
    odds = np.log(confidence / (1.0 - confidence)).clip(-LOGIT_RANGE, LOGIT_RANGE)
    return np.asarray(odds + repeat_bonus, np.float32)


def cut(column: np.ndarray, lens: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """[B, K] → a column of the seam."""
    return tuple(tuple(row[:n]) for row, n in zip(column.tolist(), lens.tolist(), strict=True))


class Controlled(Decoder):
    """Decodes as the engine's step does, in batches of ``batch`` requests one after the other."""

    def __init__(
        self,
        world: World,
        requests: int,
        controller: Controller,
        limits: Limits,
        *,
        batch: int,
        first_seed: int = 0,
        repeat_bonus: float = 0.0,
        row_s: float = ROW_S,
    ) -> None:
        """
        Args:
            row_s: seconds of a row of the target.
            repeat_bonus: what signal says more of tokens with even numbers, and less of the others.
        """
        super().__init__(world, requests, limits.draft_lens[-1], first_seed)
        self.repeat_bonus, self.row_s = repeat_bonus, row_s
        self.controller, self.limits, self.batch = controller, limits, batch
        self.name = str(first_seed)
        self.steps = self.drafted = self.trimmed = self.accepted = 0

    def run(self, count: int) -> np.ndarray:
        for start in range(0, len(self.output), self.batch):
            lanes = np.arange(start, min(start + self.batch, len(self.output)))
            while min(len(self.output[lane]) for lane in lanes) < count:
                self._step(lanes)
            self.controller.forget([f"{self.name}-{lane}" for lane in lanes])
        return np.array([tokens[:count] for tokens in self.output])

    def _step(self, lanes: np.ndarray) -> None:
        self.steps += 1
        view = view_of(self.steps, tuple(f"{self.name}-{lane}" for lane in lanes), self.limits)
        plan = self.controller.plan(view)
        drafts = self.draft(lanes)
        signal = self._signal(lanes, plan, drafts)
        drafts.lens = stopped(plan, signal)
        confidence, told = cut(signal, drafts.lens), ()
        if plan.stop is not None and plan.stop.signal == "survival":
            assert drafts.confidence is not None
            confidence, told = cut(drafts.confidence, drafts.lens), cut(signal, drafts.lens)
        shown = DraftView(tuple(drafts.lens.tolist()), confidence, told, self.shown_bonus(drafts))
        trimmed = self.controller.trim(view, plan, shown)
        lens = np.minimum(np.array(trimmed.depth), drafts.lens)
        result = self.verify(lanes, drafts, lens)
        self.commit(lanes, result)
        self.drafted += int(drafts.lens.sum())
        self.trimmed += int((drafts.lens - lens).sum())
        self.accepted += int(result.accepted.sum())
        outcome = outcome_of(view, plan, drafts.lens, lens, result.accepted, confidence, self.row_s)
        self.controller.observe(replace(outcome, signal=told))

    def shown_bonus(self, drafts: Drafts) -> tuple[tuple[float, ...], ...]:
        """The column that says what of the signal each token has brought itself."""
        return cut(self._bonuses(drafts), drafts.lens)

    def _bonuses(self, drafts: Drafts) -> np.ndarray:
        return np.where(drafts.tokens % 2 == 0, self.repeat_bonus, -self.repeat_bonus)

    def _signal(self, lanes: np.ndarray, plan: SpecPlan, drafts: Drafts) -> np.ndarray:
        if plan.stop is None or plan.stop.signal != "token_prob":
            assert drafts.confidence is not None
            return signal_of(plan, drafts.confidence, self._bonuses(drafts))
        last = np.concatenate([self.newest[lanes, None], drafts.tokens[:, :-1]], 1)
        raw = self.world.drafter_logits(last.ravel()).softmax(-1).unflatten(0, last.shape).numpy()
        signal: np.ndarray = np.take_along_axis(raw, drafts.tokens[:, :, None], -1)[:, :, 0]
        return signal


def outcome_of(
    view: StepView,
    plan: SpecPlan,
    drafted: np.ndarray,
    verified: np.ndarray,
    accepted: np.ndarray,
    confidence: tuple[tuple[float, ...], ...],
    row_s: float = ROW_S,
) -> StepOutcome:
    """What came of a step, at the toy world's prices."""
    passes, rows = int(drafted.max(initial=0)), int(verified.sum()) + verified.size
    draft_s, verify_s = DRAFT_PASS_S * passes, PASS_S + row_s * rows
    ended: list[Ended] = [
        "none" if v == 0 else "all_accepted" if a == v else "rejected" for v, a in zip(verified, accepted, strict=True)
    ]
    return StepOutcome(
        plan_step=view.step,
        ids=view.ids,
        proposer=plan.proposer,
        requested=plan.depth,
        drafted=tuple(drafted.tolist()),
        verified=tuple(verified.tolist()),
        accepted=tuple(accepted.tolist()),
        emitted=tuple((accepted + 1).tolist()),
        ended=tuple(ended),
        early_exit=(False,) * verified.size,
        confidence=confidence,
        work=Work(rows_per_pass=(verified.size,) * passes, verify_rows=rows, kv_tokens=10 * rows),
        draft_s=draft_s,
        verify_s=verify_s,
        step_s=draft_s + verify_s,
    )
