"""A step of vLLM in plain values: what was scheduled, what is decided about it, what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dynaspec.contract.step import DraftView, Ended, SpecPlan, StepView


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
    """What it asked for; None = no wish."""
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
