"""The seam between a host and a controller: StepView → SpecPlan → (DraftView → SpecPlan) → StepOutcome; and what a
controller must do.

Plain values: no tensors, no clocks. A field about requests is a *column*, a tuple with one entry a request, in
the order of ``ids``; 256 small objects would cost 240 µs a step, a column costs 1 µs. A recorded view always
gives the same plan again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from .tree import TokenTree

Signal = Literal["confidence", "token_prob", "survival"]
Scope = Literal["request", "batch_mean"]
Needs = Literal["all", "lag", "nothing"]
Ended = Literal["none", "rejected", "all_accepted", "stopped", "invalid"]
"""Why the accepted run of one request ended. ``none``: nothing was drafted. ``all_accepted`` is a censored
observation, not a miss. ``stopped``: the request ended inside the run. ``invalid``: a grammar refused."""


LOGIT_RANGE = 6.0
"""A signal from a drafter's probabilities is cut to ±6: one that says 0.9999 is no surer than one that says 0.997."""


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """What a configured proposer is, as far as a controller must know."""

    name: str
    passes_per_draft: Literal["none", "one", "per_token"] = "per_token"
    """Model passes for a draft of k tokens: 0 (lookup), 1 (parallel heads), k (autoregressive)."""
    has_confidence: bool = True
    trees: bool = False
    """It can draft trees (``SpecPlan.tree``), if the host verifies them."""
    idle_pass: bool = False
    """The first pass runs in every step, drafts or not, over the rows of the target's pass: every step pays for it."""
    probe_context: bool = False
    """It honours ``SpecPlan.probe_context``."""
    longest: int | None = None
    """Most tokens of a draft, whatever is granted; None = any."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the host can carry out. Constant while the host runs."""

    draft_lens: tuple[int, ...]
    """Draft lengths that can run, ascending from 0."""
    proposers: tuple[ProposerTraits, ...] = ()
    ragged: bool = True
    """Requests of one step may have different lengths."""
    can_stop: bool = True
    """The proposer honours a StopRule between its passes."""
    can_trim: bool = True
    """Rows may be dropped between drafting and verification."""
    can_branch: bool = False
    """Trees can be verified."""
    can_gate: bool = True
    """The drafter can leave out the KV of single draft tokens."""
    verify_budget: int | None = None
    """Most target rows in a step; None = no limit."""
    plan_lag: int = 0
    """Steps between planning and running; > 0: asynchronous host."""


@dataclass(frozen=True, slots=True)
class StepView:
    """What is known before a step. Columns hold decoding requests only."""

    step: int
    ids: tuple[str, ...]
    context_len: tuple[int, ...]
    """Committed tokens, prompt included."""
    room_depth: tuple[int, ...]
    """Most draft tokens this request can still use (max_tokens, model length)."""
    room_nodes: tuple[int, ...]
    """Most nodes of a tree that there are rows and KV entries for."""
    max_draft: tuple[int | None, ...]
    """What the request asked for: None = nothing, 0 = no speculation."""
    temperature: tuple[float, ...]
    lag: tuple[tuple[int, ...], ...]
    """One column a proposer: committed tokens that its state has not seen yet. Empty where the plan before foresaw no
    use of it."""
    offers: tuple[tuple[tuple[int, int], ...] | None, ...]
    """One entry a proposer: None, or for lookup proposers a column of (match length, tokens on offer). None throughout
    where the plan before foresaw no use of them."""
    prefill_tokens: int
    """Prompt tokens computed in this step beside the decoding rows."""
    waiting: int
    """Requests in the queue."""
    limits: Limits
    expected_acceptance: tuple[float | None, ...] = ()
    """What callers expect of each request: share of drafted tokens accepted. Empty = no request says anything."""

    def select(self, keep: Sequence[int]) -> StepView:
        """The same view of some of its requests."""
        per_proposer: dict[str, Any] = {
            "lag": tuple(tuple(column[i] for i in keep) for column in self.lag),
            "offers": tuple(c if c is None else tuple(c[i] for i in keep) for c in self.offers),
        }
        columns = ["ids", "context_len", "room_depth", "room_nodes", "max_draft", "temperature"]
        if self.expected_acceptance:
            columns.append("expected_acceptance")
        return replace(self, **_selected(self, columns, keep), **per_proposer)


@dataclass(frozen=True, slots=True)
class StopRule:
    """When to stop drafting, evaluated after each drafter pass, on the device if there is one.

    After pass j (0-based) drafting ends where the signal is < ``below[j]``: for every request by itself
    (``request``) or for all when the mean over the rows still drafting is (``batch_mean``). The token that fell
    below is kept and verified.
    """

    below: tuple[float, ...]
    scope: Scope = "request"
    signal: Signal = "confidence"
    weight: float = 1.0
    """For ``survival``, with ``bias`` and ``offset``: the signal is the product, over the draft so far, of
    σ(weight · signal + bias[position] + offset[request]), the chance that all of it is accepted; see
    ``DraftView.signal``."""
    bias: tuple[float, ...] = ()
    """One entry a position; the last one goes on for longer drafts."""
    offset: tuple[float, ...] = ()
    """One entry a request of the plan."""
    total_below: tuple[float, ...] = ()
    """One entry a pass, like ``below``: drafting ends for all where Σ (signal − ``below``) over the rows that would go
    on is less, since a pass is paid for by all of them together. Empty = never."""

    def select(self, keep: Sequence[int]) -> StopRule:
        """The same rule for some of its plan's requests."""
        return self if not self.offset else self.with_offset(tuple(self.offset[i] for i in keep))

    def with_offset(self, offset: tuple[float, ...]) -> StopRule:
        """The same rule for other requests."""
        return StopRule(
            self.below, self.scope, self.signal, self.weight, self.bias, offset, self.total_below
        )  # as in ``SpecPlan.at``


@dataclass(frozen=True, slots=True)
class TreeRule:
    """How drafts branch. A tree's tokens are the drafter's likeliest choices, never drawn: so whether a node is drafted
    or verified may depend on the node itself.

    The survival of a node is the chance that the whole path to it is accepted: with ``StopRule.signal`` ``survival``
    as that rule estimates it, else the product of the tokens' probabilities (EAGLE-2, 2406.16858). A draft is made of
    the nodes of largest survival, in this order: any beginning of it is a tree.
    """

    width: int
    """Most children of a node, and most nodes of a request that a pass goes on from."""
    below: tuple[float, ...] = (0.0,)
    """By place in the draft, the survival below which it ends; the last one goes on. One node there is in any case."""
    later: float = 1.0
    """With the signal ``survival``: what the probability of a choice that is not the drafter's first is multiplied by,
    to be the chance that it is accepted. ``StopRule`` is about first choices."""
    shape: TokenTree | None = None
    """The nodes, whatever their survival; as many of them, in their order, as are granted."""


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """What to draft and verify in one step."""

    step: int
    depth: tuple[int, ...]
    """Draft length granted to each request; 0 = plain decoding."""
    proposer: tuple[int, ...]
    """Index into ``Limits.proposers``, for each request."""
    nodes: tuple[int, ...]
    """Tokens granted in all; equals depth for chains."""
    stop: StopRule | None = None
    verify_nodes: int | None = None
    """Most drafted tokens verified in this step over all requests; None = all."""
    gate_kv_below: float = 0.0
    """The drafter keeps no KV of a token with confidence below this."""
    next_needs: Needs = "all"
    """What the next plan may use of ``StepView.lag`` and ``offers``; the host need not ask proposers for the rest."""
    probe_context: int = 0
    """Of a request of which the drafter lacks more than so many tokens, it reads about as many of the latest only, to
    draft one token from them, and lacks as much afterwards. 0 = it reads all."""
    tree: TreeRule | None = None
    """How drafts branch; None = they are chains. Proposers that draft chains only do so in any case."""

    def at(self, step: int, depth: tuple[int, ...] | None = None) -> SpecPlan:
        """The same plan for another step; with ``depth``, for chains of these lengths."""
        return SpecPlan(
            step,
            self.depth if depth is None else depth,
            self.proposer,
            self.nodes if depth is None else depth,
            self.stop,
            self.verify_nodes,
            self.gate_kv_below,
            self.next_needs,
            self.probe_context,
            self.tree if depth is None else None,
        )  # replace() would take five times as long, every step

    def needing(self, next_needs: Needs) -> SpecPlan:
        """The same plan, after which the next one needs that."""
        if next_needs == self.next_needs:
            return self
        columns = (self.step, self.depth, self.proposer, self.nodes, self.stop, self.verify_nodes, self.gate_kv_below)
        return SpecPlan(*columns, next_needs, self.probe_context, self.tree)  # as in ``at``

    def with_depth(self, depth: tuple[int, ...]) -> SpecPlan:
        """The same plan for chains of other lengths."""
        return self.at(self.step, depth)

    def with_nodes(self, depth: tuple[int, ...], nodes: tuple[int, ...]) -> SpecPlan:
        """The same plan for trees of other sizes; for chains, ``nodes`` are their lengths."""
        return replace(self, depth=depth, nodes=nodes) if self.tree else self.at(self.step, nodes)

    def select(self, keep: Sequence[int]) -> SpecPlan:
        """The same plan for some of its requests."""
        stop = None if self.stop is None else self.stop.select(keep)
        return replace(self, stop=stop, **_selected(self, ("depth", "proposer", "nodes"), keep))


@dataclass(frozen=True, slots=True)
class DraftView:
    """What was drafted, before verification."""

    length: tuple[int, ...]
    confidence: tuple[tuple[float, ...], ...]
    """For each request, the drafter's confidence in each of its tokens; empty where it has none."""
    signal: tuple[tuple[float, ...], ...] = ()
    """For each request, how much speaks for each of its tokens, on the scale of a logit: all that the proposer knows
    beside the confidence. Empty (as a whole, or for a request) = logit(confidence), cut to ±``LOGIT_RANGE``."""
    repeat_bonus: tuple[tuple[float, ...], ...] = ()
    """For each request, the part of the signal that each token brought itself by being the one that was drawn. It may
    decide what is drafted and verified behind the token, never whether the token itself is verified: that would favour
    some tokens over others. Empty (as a whole, or for a request) = nothing."""
    parents: tuple[tuple[int, ...], ...] | None = None
    """For trees, each node's parent, which comes before it (−1: the last committed token). The likeliest of a node's
    children comes first. None for chains."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that a step really did, which is what its time is explained by."""

    rows_per_pass: tuple[int, ...] = ()
    """Rows of each drafter pass; its length is the number of drafter passes."""
    verify_rows: int = 0
    """Rows of the target pass that belong to decoding requests."""
    kv_tokens: int = 0
    """Σ over the target pass's rows of the KV entries each attended to."""
    prefill_rows: int = 0
    kv_skipped: int = 0
    """Draft tokens whose drafter KV was not written, because of ``SpecPlan.gate_kv_below``."""
    kv_redone: int = 0
    """Committed tokens that the drafter processed a second time, because the first time left no usable KV."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of a plan: counts and seconds, never ratios. May reach the controller a step or two late."""

    plan_step: int
    ids: tuple[str, ...]
    proposer: tuple[int, ...]
    requested: tuple[int, ...]
    """Draft length granted."""
    drafted: tuple[int, ...]
    """Tokens proposed."""
    verified: tuple[int, ...]
    """Drafted tokens that the target pass tested."""
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    """Tokens committed, the target's own included."""
    ended: tuple[Ended, ...]
    early_exit: tuple[bool, ...]
    """Drafting stopped before the granted length because of the stop rule."""
    confidence: tuple[tuple[float, ...], ...]
    work: Work = field(default_factory=Work)
    draft_s: float = 0.0
    verify_s: float = 0.0
    """Hosts that cannot tell drafting from verifying leave both at 0; then ``work`` explains ``step_s`` as a whole."""
    step_s: float = 0.0
    """From the beginning of its planning, or from the end of the step before if that was later."""
    signal: tuple[tuple[float, ...], ...] = ()
    """See ``DraftView``."""
    tested: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    """For trees: for each request, the children of the root and of every accepted node, as far as there were any, in
    the order of the draft; ~node of those that were not accepted. None for chains."""
    plan_s: float = 0.0
    """What the controller's plan took of ``step_s``; 0 = not known, or it was planned during the step before."""
    came_true: tuple[tuple[tuple[int, int, int], ...] | None, ...] = ()
    """One entry a proposer: None, or for lookup proposers a column of (match length, tokens on offer that the text has
    got to, how many of them, from the first on, are the text's), whether they were drafted or not. Empty = not known.
    """


def _selected(value: object, columns: Sequence[str], keep: Sequence[int]) -> dict[str, Any]:
    return {name: tuple(getattr(value, name)[i] for i in keep) for name in columns}


class Controller(Protocol):
    """Decides how much to draft and to verify. Pure: no clock, no tensors, no randomness but a seeded one."""

    def plan(self, view: StepView) -> SpecPlan:
        """Draft lengths for this step; within the view's rooms, the limits and what requests asked for."""
        ...

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        """How many of the drafted tokens to verify (``depth`` never above what was drafted).

        Causal: a request's cut may depend on its tokens up to the cut and on other requests, never on its own
        tokens behind the cut.
        """
        ...

    def observe(self, outcome: StepOutcome) -> None:
        """Learns from a step; may come late, and out of order by one."""
        ...

    def forget(self, ids: Sequence[str]) -> None:
        """These requests have ended."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A controller that can say what it believes; for metrics, the decision log and people."""

    def estimates(self) -> Mapping[str, Any]:
        """Plain JSON values: what the latest decision rested on."""
        ...
