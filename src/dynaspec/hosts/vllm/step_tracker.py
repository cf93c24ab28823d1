"""Puts a controller in charge of vLLM's draft lengths. Knows vLLM's order of events, but imports nothing of vLLM.

A step of vLLM is plain values here: what was scheduled, what is decided about it, what came of it. They are read off
vLLM's objects, of which nothing is changed.

vLLM drafts at the end of a step and verifies in the next one::

    step i      target pass: verifies what step i−1 drafted  │ drafter: drafts for plan i
    step i + 1  target pass: verifies what step i drafted    │ drafter: drafts for plan i + 1

So plan i, made when step i is scheduled, is about tokens that step i + 1 verifies, and its outcome is told when that
step's output is there. Under asynchronous scheduling step i + 1 is scheduled before step i has ended, so that feedback
comes one step later still. Either way the view of plan i foresees the state after step i: each request's length and
room as if step i brought it a single token.

The outcome of plan i says two things, each of them true by itself: ``drafted`` … ``emitted`` are those of plan i's
tokens, and ``work`` is all the work of the step that took ``step_s`` seconds, step i + 1: its target pass over plan i's
tokens and its drafting for plan i + 1. vLLM does not say how long each of them took, so ``draft_s`` and ``verify_s``
are 0, and a controller learns its cost model from how the seconds of whole steps follow their work. Steps that change
from plain decoding to drafting do the one's verification and the other's drafting; controllers tell them by their work.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynaspec.contract.step import Controller, DraftView, Ended, Limits, SpecPlan, StepOutcome, StepView, Work
from dynaspec.observe.stats import SpecStats

from .settings import KEY, Drafter, VllmSpeculation

logger = logging.getLogger(__name__)

_REQUESTED = "num_speculative_tokens"


def speculation_of(vllm_config: Any) -> VllmSpeculation:
    """What vLLM's configuration says of speculation, which it must have."""
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    return VllmSpeculation(
        method=spec.method,
        longest=spec.num_speculative_tokens,
        model=spec.model,
        target=vllm_config.model_config.model,
        lookup=None if spec.prompt_lookup_max is None else (spec.prompt_lookup_min, spec.prompt_lookup_max),
        table=tuple(tuple(entry) for entry in spec.num_speculative_tokens_per_batch_size or ()),
        parallel=spec.parallel_drafting,
        runner_v2=vllm_config.use_v2_model_runner,
        on_cpu=vllm_config.device_config.device_type == "cpu",
        asynchronous=bool(vllm_config.scheduler_config.async_scheduling),
        ranks=parallel.data_parallel_size,
        rank=parallel.data_parallel_rank,
    )


def drafter_length(vllm_config: Any) -> int | None:
    """Tokens up to which the drafter runs for a batch; beyond, it drafts for nobody. None = each request by itself."""
    if vllm_config.use_v2_model_runner:
        return None
    spec = vllm_config.speculative_config
    draft = spec.draft_model_config
    own = None if draft is None else draft.max_model_len
    longest = vllm_config.model_config.max_model_len if own is None else own
    return int(longest - spec.num_speculative_tokens - (spec.method == "dflash"))


def rows_of(
    requests: Mapping[str, Any], output: Any, max_model_len: int, asked: Callable[[Any], int | None]
) -> list[Row]:
    """The requests of a step that vLLM has just put together, before it counts the step's tokens as computed.

    Args:
        requests: vLLM's, by id.
        output: ``SchedulerOutput``.
        asked: most tokens that a request wants drafted; None = it does not say.
    """
    drafts = output.scheduled_spec_decode_tokens
    return [
        _row(requests[request], count, len(drafts.get(request, ())), max_model_len, asked(requests[request]))
        for request, count in output.num_scheduled_tokens.items()
    ]


def _row(request: Any, count: int, drafts: int, max_model_len: int, asked: int | None) -> Row:
    length = request.num_computed_tokens + count - drafts + 1
    space = max_model_len - length
    left = min(request.max_tokens - (length - request.num_prompt_tokens), space)
    params = request.sampling_params
    return Row(
        id=request.request_id,
        rows=count,
        drafts=drafts,
        computed=request.num_computed_tokens,
        decoding=count == 1 + drafts and request.num_output_tokens + request.num_output_placeholders > 0,
        goes_on=request.num_computed_tokens + count >= request.num_tokens + request.num_output_placeholders,
        length=length,
        room=max(0, left - 1),
        max_draft=asked,
        temperature=0.0 if params is None else params.temperature,
        space=max(0, space - 1),
    )


def requested_max(extra_args: Mapping[str, Any] | None) -> int | None:
    """How many tokens a request wants drafted at most: ``{"dynaspec": {"num_speculative_tokens": 2}}``, the inner part
    as JSON text where only that can be sent. None = it does not say, or not so that it can be understood, which is
    logged.
    """
    told = None if extra_args is None else extra_args.get(KEY)
    if told is None:
        return None
    try:
        asked = (json.loads(told) if isinstance(told, str) else told).get(_REQUESTED)
    except (AttributeError, json.JSONDecodeError):
        logger.warning("a request's %s is %r; expected a mapping with %s", KEY, told, _REQUESTED)
        return None
    if asked is None or (isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0):
        return None if asked is None else int(asked)
    logger.warning("a request's %s is %r; expected an integer of at least 0", _REQUESTED, asked)
    return None


def sampled_of(output: Any, ran: Any) -> dict[str, int]:
    """Tokens that the target agreed to, by request, before vLLM cuts them at a stop.

    Args:
        output: ``SchedulerOutput``.
        ran: ``ModelRunnerOutput``.
    """
    tokens, index = ran.sampled_token_ids, ran.req_id_to_index
    if not tokens:
        return {}
    return {request: len(tokens[index[request]]) for request in output.num_scheduled_tokens if request in index}


def verified_of(output: Any, sampled: Mapping[str, int], told: Mapping[int, Any]) -> dict[str, Verified]:
    """What came of a step, of the requests that got something out of it.

    Args:
        output: ``SchedulerOutput``.
        sampled: see ``sampled_of``.
        told: ``EngineCoreOutputs`` by client.
    """
    invalid = output.num_invalid_spec_tokens or {}
    return {
        out.request_id: Verified(sampled[out.request_id], len(out.new_token_ids), invalid.get(out.request_id, 0))
        for client in told.values()
        for out in client.outputs
        if out.new_token_ids and sampled.get(out.request_id)
    }


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part in a step that has been scheduled."""

    id: str
    rows: int
    """Tokens scheduled."""
    drafts: int
    """Of these, drafted ones."""
    computed: int
    """Tokens with KV before the step; under asynchronous scheduling, if all drafts in flight are accepted."""
    decoding: bool
    """It has output already."""
    goes_on: bool
    """After the step its prompt is computed, so the step drafts for it."""
    length: int
    """Tokens it has after the step if none of its drafts is accepted."""
    room: int
    """Most draft tokens that it can use in its next step."""
    max_draft: int | None = None
    """What it asked for; None = nothing."""
    temperature: float = 0.0
    space: int = 0
    """Most draft tokens that its next step can verify, of use or not."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What one decoding request got out of a step."""

    sampled: int
    """Tokens the target agreed to, its own included."""
    emitted: int
    """Of these, tokens that became output."""
    invalid: int = 0
    """Drafts in its rows that its grammar had refused, and that were not tested."""


@dataclass(slots=True)
class Draft:
    """What was drafted for one request, until it is verified."""

    step: int
    """Of the plan."""
    granted: int
    drafted: int
    kept: int
    """Tokens left after trimming."""
    valid: int
    """Tokens left after the request's grammar has looked."""


@dataclass(slots=True)
class Step:
    """A scheduled step, until its output is there."""

    started_s: float
    rows: Sequence[Row]
    k: int
    """Draft length of the whole batch."""
    view: StepView | None = None
    """Of the requests that are drafted for; None = there are none, or nothing can be drafted."""
    plan: SpecPlan | None = None
    counts: bool = True
    """Its work is that of a usual step: it teaches something about costs."""
    tested: Mapping[str, Draft] = field(default_factory=dict)
    """The drafts that its rows verify, by request."""

    @property
    def depths(self) -> Iterator[tuple[str, int]]:
        """(request, length granted) of this step's plan."""
        return iter(()) if self.plan is None or self.view is None else zip(self.view.ids, self.plan.depth, strict=True)


def draft_view(view: StepView, lengths: Mapping[str, int]) -> DraftView:
    """What was drafted; vLLM's runners tell no confidences."""
    return DraftView(
        length=tuple(lengths.get(request, 0) for request in view.ids),
        confidence=((),) * len(view.ids),
    )


def how_ended(draft: Draft | None, tested: int, accepted: int, emitted: int, invalid: int) -> Ended:
    """Why the accepted run of one request ended.

    Args:
        draft: None = there was none.
        tested: drafted tokens that the target's pass tested.
        accepted: those of them that it agreed to, before the request's end cut them.
        invalid: see ``Verified``.
    """
    if draft is None or (tested == 0 and draft.valid == draft.kept and not invalid):
        return "none"
    if emitted <= accepted:
        return "stopped"
    if accepted < tested:
        return "rejected"
    refused = invalid > 0 or (draft.valid < draft.kept and tested == draft.valid)
    return "invalid" if refused else "all_accepted"


class StepTracker:
    """One engine's controller, and the drafts whose fate is still open. Called from one thread."""

    def __init__(self, controller: Controller, drafter: Drafter, limits: Limits, *, alike: bool = False) -> None:
        """
        Args:
            limits: of the host; their proposers are the drafter alone.
            alike: what is drafted for one request is verified for all, as far as they can: see ``_levelled``.
        """
        self._controller = controller
        self._drafter = drafter
        self._limits = limits
        self._alike = alike
        self._drafts: dict[str, Draft] = {}
        self._next_step = 0
        self._measured: tuple[partial[StepOutcome], float, float] | None = None
        """The latest outcome but for its seconds, when its step began, and when it ended."""
        self._last_end = 0.0
        self.stats = SpecStats()
        """Of all outcomes."""
        self.k = 0
        """Draft length of the latest step."""

    # --- scheduling ---------------------------------------------------------------------------------------------

    def schedule(self, rows: Sequence[Row], waiting: int, started_s: float, *, drafts: bool = True) -> Step:
        """Decides how much is drafted at the end of a step.

        Args:
            rows: of the requests that the step runs, in its order.
            waiting: requests in the queue.
            started_s: when the step began to be scheduled.
            drafts: whether the drafter can run; where it cannot, the step teaches nothing.
        """
        self._tell()
        tested = {row.id: self._drafts.pop(row.id) for row in rows if row.id in self._drafts}
        view = self._view(rows, waiting) if drafts else None
        plan = None if view is None else self._controller.plan(view)
        if self._alike and plan is not None:
            plan = _levelled(plan, [row for row in rows if row.goes_on], self._limits.draft_lens[-1])
        deepest = 0 if plan is None else max(plan.depth)
        self.k = deepest if self._drafter.varies else self._limits.draft_lens[-1]
        step = Step(started_s, rows, self.k, view, plan, drafts, tested)
        for request, depth in step.depths:
            # Asynchronous hosts never learn how many tokens a drafter has found: as many as it was asked for.
            self._drafts[request] = Draft(
                step=self._next_step - 1, granted=depth, drafted=depth, kept=depth, valid=depth
            )
        return step

    def _view(self, rows: Sequence[Row], waiting: int) -> StepView | None:
        """The requests that the step drafts for, as they will be after it; None if there are none."""
        going = [row for row in rows if row.goes_on]
        if not going:
            return None
        room = tuple([max(0, row.room) for row in going])
        step, self._next_step = self._next_step, self._next_step + 1
        return StepView(
            step=step,
            ids=tuple([row.id for row in going]),
            context_len=tuple([row.length for row in going]),
            room_depth=room,
            room_nodes=room,
            max_draft=tuple([row.max_draft for row in going]),
            temperature=tuple([row.temperature for row in going]),
            lag=((0,) * len(going),),
            offers=(None,),
            # What still reads its prompt will go on doing so.
            prefill_tokens=sum([row.rows for row in rows if not row.goes_on]),
            waiting=waiting,
            limits=self._limits,
        )

    # --- after the step -----------------------------------------------------------------------------------------

    def commit(self, step: Step, verified: Mapping[str, Verified], ended_s: float) -> None:
        """The step's output is there.

        Args:
            verified: of the decoding requests that are still there.
            ended_s: when.
        """
        self._tell()
        rows = [row for row in step.rows if row.decoding and row.id in verified]
        tested = [step.tested.get(row.id) for row in rows]
        plans = [draft.step for draft in tested if draft is not None]
        if not plans or not step.counts:
            self._last_end = ended_s
            return
        got = [verified[row.id] for row in rows]
        rows_tested = [row.drafts - result.invalid for row, result in zip(rows, got, strict=True)]
        accepted = [min(max(0, result.sampled - 1), result.emitted) for result in got]
        columns = zip(tested, rows_tested, got, strict=True)
        outcome = partial(
            StepOutcome,
            plan_step=max(plans),
            ids=tuple([row.id for row in rows]),
            proposer=(0,) * len(rows),
            requested=tuple([0 if draft is None else draft.granted for draft in tested]),
            drafted=tuple([0 if draft is None else draft.drafted for draft in tested]),
            verified=tuple(rows_tested),
            accepted=tuple(accepted),
            emitted=tuple([result.emitted for result in got]),
            ended=tuple([how_ended(d, n, max(0, r.sampled - 1), r.emitted, r.invalid) for d, n, r in columns]),
            early_exit=(False,) * len(rows),
            confidence=((),) * len(rows),
            work=self._work(step),
        )
        self._measured = outcome, step.started_s, ended_s

    def drafted(self, step: Step, lengths: Mapping[str, int], ended_s: float) -> Mapping[str, int]:
        """The step's drafts are there (synchronous hosts); how many of them to verify, by request.

        Args:
            lengths: tokens drafted for each request.
            ended_s: when they were: the step's true end.
        """
        if self._measured is not None:
            self._measured = (*self._measured[:2], ended_s)
        self._tell()
        if step.view is None or step.plan is None:
            return {}
        plan = self._controller.trim(step.view, step.plan, draft_view(step.view, lengths))
        self.k = max([min(depth, lengths.get(request, 0)) for request, depth in step.depths], default=0)
        for request, depth in zip(step.view.ids, plan.depth, strict=True):
            draft = self._drafts.get(request)
            if draft is not None:
                draft.drafted = min(draft.granted, lengths.get(request, 0))
                draft.kept = draft.valid = min(depth, draft.drafted)
        return dict(zip(step.view.ids, plan.depth, strict=True))

    def checked(self, lengths: Mapping[str, int]) -> None:
        """Grammars have looked at the drafts: tokens that they left, by request."""
        for request, length in lengths.items():
            draft = self._drafts.get(request)
            if draft is not None:
                draft.valid = min(draft.kept, length)

    def forget(self, ended: Sequence[str], preempted: Sequence[str] = ()) -> None:
        """These requests have ended; drafts of these preempted ones are lost, while what was learnt of them stays."""
        for request in (*ended, *preempted):
            self._drafts.pop(request, None)
        if ended:
            self._tell()
            self._controller.forget(ended)

    # --- telling ------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """The latest outcome, once its seconds are known."""
        if self._measured is None:
            return
        made, started_s, ended_s = self._measured
        self._measured = None
        outcome = made(step_s=max(0.0, ended_s - max(started_s, self._last_end)))
        self._last_end = ended_s
        self._controller.observe(outcome)
        self.stats.record(outcome)

    def _work(self, step: Step) -> Work:
        decoding = sum([row.rows for row in step.rows if row.decoding])
        total = sum([row.rows for row in step.rows])
        return Work(
            rows_per_pass=self._drafter.rows_per_pass(step.k, total, len(step.rows)),
            verify_rows=decoding,
            kv_tokens=sum([row.rows * row.computed + row.rows * (row.rows + 1) // 2 for row in step.rows]),
            prefill_rows=total - decoding,
        )


def _levelled(plan: SpecPlan, rows: Sequence[Row], longest: int) -> SpecPlan:
    """The plan at its greatest length for all, but for those that wish for less or have come near the model's end.

    vLLM has drafted that much for everybody, and its kernels for CPUs are made for each number of rows when it first
    occurs, which takes as long as half a step of a small model, and kept for a few: where every request has a length
    of its own, hardly any number occurs twice. What a request cannot use any more is verified in vain, as vLLM itself
    does.

    Args:
        rows: of the plan's requests.
        longest: that vLLM drafts.
    """
    deepest = max(plan.depth)
    asked_lens = [longest if row.max_draft is None else row.max_draft for row in rows]
    return plan.with_depth(tuple([min(deepest, row.space, asked) for row, asked in zip(rows, asked_lens, strict=True)]))
