"""Views and outcomes for tests of controllers, and hypothesis strategies for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from dynaspec.contract.step import Controller, DraftView, Limits, ProposerTraits, SpecPlan, StepOutcome, StepView
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller

FIFTY_CASES = settings(max_examples=50)
"""For property tests on a machine that does other work."""

H100_PROFILE = Path(__file__).with_name("h100_profile.json")
"""As published with vLLM's dynamic speculative decoding; the file says where."""
ONLINE_PROFILE = Path(__file__).with_name("online_profile.json")

DRAFT_MODEL = ProposerTraits(name="draft_model")


def limits(*draft_lens: int, **fields: Any) -> Limits:
    """Limits with these lengths; 0 … 64 without any."""
    return Limits(draft_lens or tuple(range(65)), proposers=(DRAFT_MODEL,), **fields)


def view(ids: str, host: Limits, *, step: int = 0, prefill: int = 0, **columns: tuple[Any, ...]) -> StepView:
    """A view of one-letter requests; rooms of 64 and no limits of their own unless ``columns`` says otherwise."""
    size = len(ids)
    values: dict[str, Any] = {
        "ids": tuple(ids),
        "context_len": (10,) * size,
        "room_depth": (64,) * size,
        "max_draft": (None,) * size,
        "temperature": (0.0,) * size,
        "lag": ((0,) * size,),
        "offers": (None,),
    } | columns
    values.setdefault("room_nodes", values["room_depth"])
    return StepView(step=step, prefill_tokens=prefill, waiting=0, limits=host, **values)


@dataclass(frozen=True)
class Fate:
    """What became of one request's draft."""

    requested: int
    accepted: int
    rejected: bool
    confidence: tuple[float, ...] = ()

    @property
    def drafted(self) -> int:
        return self.accepted + self.rejected


def outcome(step: int = 0, /, **fates: Fate) -> StepOutcome:
    """The outcome of a step in which each request met its fate; all drafted tokens were verified."""
    column = tuple(fates.values())
    return StepOutcome(
        plan_step=step,
        ids=tuple(fates),
        proposer=(0,) * len(column),
        requested=tuple(f.requested for f in column),
        drafted=tuple(f.drafted for f in column),
        verified=tuple(f.drafted for f in column),
        accepted=tuple(f.accepted for f in column),
        emitted=tuple(f.accepted + 1 for f in column),
        ended=tuple("rejected" if f.rejected else "all_accepted" if f.drafted else "none" for f in column),
        early_exit=(False,) * len(column),
        confidence=tuple(f.confidence for f in column),
    )


def accepted(k: int) -> Fate:
    """A draft of k tokens, accepted whole."""
    return Fate(requested=k, accepted=k, rejected=False)


def rejected(k: int, after: int = 0) -> Fate:
    """A draft of k tokens, rejected after some."""
    return Fate(requested=k, accepted=after, rejected=True)


def controller(host: Limits, **keys: Any) -> Controller:
    """The controller of a draft-model configuration."""
    return build_controller(SpeculativeConfig(model="drafter", **keys), host)


POLICY_KEYS: tuple[dict[str, Any], ...] = (
    {"policy": "constant"},
    {"policy": "heuristic"},
    {"policy": "heuristic_transient"},
    {"draft_confidence_threshold": 0.5},
    {"draft_confidence_threshold": "auto"},
    {"policy": "heuristic", "disable_by_batch_size": 3},
    {"num_speculative_tokens_per_batch_size": [[1, 1, 4], [3, 4, 3], [5, 9, 0]]},
    {"num_speculative_tokens_per_batch_size": [[1, 2, 9]], "draft_confidence_threshold": "auto"},
    {"dynamic_config_path": H100_PROFILE, "num_speculative_tokens": 5},
    {"dynamic_config_path": ONLINE_PROFILE, "draft_confidence_threshold": 0.4, "disable_by_batch_size": 4},
    {"draft_length_options": [4, 8, 12], "num_speculative_tokens": 12},
    {
        "draft_length_options": [4, 9],
        "num_speculative_tokens": 9,
        "draft_confidence_threshold": 0.4,
        "kv_write_gating_threshold": 0.3,
    },
)
"""Of every policy but ``auto``, whose trims follow other rules and which has tests of its own."""


@st.composite
def hosts(draw: st.DrawFn) -> Limits:
    """Any limits that allow a draft of 1 … 4 tokens."""
    shortest = draw(st.integers(1, 4))
    longer = draw(st.sets(st.integers(shortest + 1, 40), max_size=6))
    return limits(
        0,
        shortest,
        *sorted(longer),
        ragged=draw(st.booleans()),
        can_trim=draw(st.booleans()),
        verify_budget=draw(st.none() | st.integers(0, 40)),
        plan_lag=draw(st.integers(0, 1)),
    )


@st.composite
def views(draw: st.DrawFn, host: Limits, step: int) -> StepView:
    """Any view of up to 6 requests."""
    ids = draw(st.sets(st.sampled_from("abcdefgh"), max_size=6).map(lambda s: "".join(sorted(s))))
    column = {"min_size": len(ids), "max_size": len(ids)}
    rooms = tuple(draw(st.lists(st.integers(0, 50), **column)))
    limits = tuple(draw(st.lists(st.none() | st.integers(0, 50), **column)))
    prefill = draw(st.integers(0, 8))
    return view(ids, host, step=step, prefill=prefill, room_depth=rooms, max_draft=limits)


@st.composite
def draft_views(draw: st.DrawFn, plan: SpecPlan) -> DraftView:
    """Any drafts within the plan."""
    lengths = tuple(draw(st.integers(0, depth)) for depth in plan.depth)
    confidence = st.floats(0, 1)
    columns = tuple(tuple(draw(st.lists(confidence, min_size=n, max_size=n))) for n in lengths)
    return DraftView(length=lengths, confidence=columns)


@st.composite
def outcomes(draw: st.DrawFn, seen: StepView, plan: SpecPlan, drafts: DraftView) -> StepOutcome:
    """Any outcome of drafts verified as ``plan`` says after its trim."""
    fates = {}
    for request, depth, confidence in zip(seen.ids, plan.depth, drafts.confidence, strict=True):
        length = draw(st.integers(0, depth))
        fates[request] = Fate(depth, length, length < depth, confidence)
    return outcome(seen.step, **fates)
