"""Drafters with known behaviour that a profile is measured with."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from adversary import CONFIDENT, Adversarial, lengths_when_sure
from dynaspec.bench.decoders import Job, open_engine, run_all
from dynaspec.bench.profile_session import Padded
from dynaspec.contract.proposer import Drafts, ProposerNeeds
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import ProposerTraits, SpecPlan, StopRule
from dynaspec.control.policies.short_names import parse_policy

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
JOBS = [Job((5, 6, 7), PARAMS), Job((9, 8, 7, 6), PARAMS)]


@pytest.fixture(scope="module")
def expected(tiny):
    engine = open_engine(tiny.target, parse_policy("plain", None), max_num_seqs=2)
    outputs = run_all(engine, JOBS, 2).outputs
    engine.close()
    return outputs


def plan(depth: tuple[int, ...], stop: StopRule | None) -> SpecPlan:
    return SpecPlan(step=0, depth=depth, proposer=(0,) * len(depth), nodes=depth, stop=stop)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, [4, 0, 2]),
        (StopRule(below=(0.9,)), [4, 0, 2]),
        (StopRule(below=(0.9, 0.9, 0.99)), [3, 0, 2]),
        (StopRule(below=(0.99,)), [1, 0, 1]),
        (StopRule(below=(0.99,), scope="batch_mean"), [1, 0, 1]),
        (StopRule(below=(0.5,), signal="survival", bias=(0.0,), offset=(0.0, 0.0, -5.0)), [4, 0, 1]),
    ],
)
def test_how_far_a_sure_drafter_goes(stop, expected):
    assert lengths_when_sure(plan((4, 0, 2), stop), CONFIDENT).tolist() == expected


@pytest.mark.parametrize(("below", "expected"), [(0.95, 3), (0.97, 2), (0.985, 1)])
def test_a_sure_drafter_survives_by_the_evidence_that_its_confidence_is(below, expected):
    # Nothing but the confidence speaks for its tokens: σ(logit 0.98) = 0.98, then 0.96, 0.94, …
    stop = StopRule(below=(below,), signal="survival")
    assert lengths_when_sure(plan((9,), stop), CONFIDENT).tolist() == [expected]


def adversary(tiny, policy: str) -> tuple[list[Adversarial], object]:
    kept: list[Adversarial] = []

    def wrap(inner):
        kept.append(Adversarial(inner, 320))
        return kept[-1]

    return kept, open_engine(tiny.target, parse_policy(policy, tiny.drafter), wrap=wrap, max_num_seqs=2)


@pytest.mark.parametrize("policy", ["constant:4", "confidence:0.5:6", "auto:6"])
def test_an_adversary_is_no_use_and_does_no_harm(tiny, expected, policy, monkeypatch):
    # Each reading of the clock is a millisecond: ``auto`` drafts or not whatever else the machine is doing.
    monkeypatch.setattr("time.perf_counter", lambda readings=count(): 1e-3 * next(readings))
    _, engine = adversary(tiny, policy)
    assert run_all(engine, JOBS, 2).outputs == expected
    counts = engine.stats()
    assert counts.draft_tokens > 0
    assert counts.accepted <= 0.1 * counts.draft_tokens
    assert counts.proposer_faults == 0
    engine.verify_integrity()
    engine.close()


def test_it_costs_what_its_drafter_does_and_claims_to_be_sure(tiny):
    # The drafter itself would stop early; the adversary is sure, and drafts on.
    _, engine = adversary(tiny, "confidence:0.9:6")
    run_all(engine, JOBS, 2)
    counts = engine.stats()
    engine.close()
    assert counts.early_exits == 0
    assert counts.drafted_per_pos[:5] == (counts.drafts,) * 5 or counts.drafted_per_pos[5] > 0
    assert counts.drafter_passes >= 5 * counts.steps / 2


def test_it_can_be_switched_off(tiny, expected):
    (adversarial, *_), engine = adversary(tiny, "constant:4")
    adversarial.active = False
    assert run_all(engine, JOBS, 2).outputs == expected
    useful = engine.stats()
    adversarial.active = True
    run_all(engine, JOBS, 2)
    useless = engine.stats() - useful
    engine.close()
    assert useful.draft_acceptance_rate > 0.2 > useless.draft_acceptance_rate


class Telling:
    """Drafts two tokens, with everything that a drafter can say of them."""

    traits, needs = ProposerTraits("telling"), ProposerNeeds()

    def propose(self, batch, plan):
        signal = np.full((1, 2), 0.5, dtype=np.float32)
        return Drafts(np.ones((1, 2), np.int64), np.array([2]), confidence=signal, signal=signal)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_of_tokens_that_fill_up_nothing_is_said(depth):
    drafts = Padded(Telling()).propose(None, plan((depth,), None))
    assert drafts.lens.tolist() == [depth]
    assert drafts.confidence is None
    assert drafts.signal is None


def test_padded_lookups_are_always_full(tiny, expected):
    engine = open_engine(tiny.target, parse_policy("ngram:constant:3", None), wrap=Padded, max_num_seqs=2)
    done = run_all(engine, JOBS, 2)
    engine.close()
    assert done.outputs == expected
    steps = [step.counts for step in done.steps if step.counts.prefill_rows == 0][:4]
    assert [counts.draft_tokens for counts in steps] == [3 * counts.request_steps for counts in steps]
