from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.contract.proposer import DecodeBatch, Drafts, Offers, ProposerNeeds
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import ProposerTraits, SpecPlan, StopRule, TreeRule
from dynaspec.propose.guard import FaultBarrier, TargetPassTimer, nonsense
from dynaspec.propose.router import Router, merge, view_columns
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.state import SamplerState
from dynaspec.verify.chain import accept_chain
from unit.propose.batches import batch, offered, plan, target

VOCAB = 8


class Stub:
    """Drafts its own token; remembers what it was told."""

    traits = ProposerTraits(name="stub")
    needs = ProposerNeeds()

    def __init__(
        self, token: int, *, q: bool = False, confidence: float | None = None, signal: float | None = None
    ) -> None:
        self.token, self.q, self.confidence, self.signal = token, q, confidence, signal
        self.batches: list[DecodeBatch] = []
        self.plans: list[SpecPlan] = []
        self.calls: list[tuple[Any, ...]] = []
        self.broken = False

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        return (self.token,) * len(batch.ids)

    def peek(self, batch: DecodeBatch) -> Offers | None:
        return None if self.q else offered(((1, self.token),) * len(batch.ids))

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        if self.broken:
            raise ZeroDivisionError
        self.batches.append(batch)
        self.plans.append(plan)
        lens = np.array(plan.depth, dtype=np.int64)
        shape = (lens.size, int(lens.max()))
        tokens = np.where(np.arange(shape[1]) < lens[:, None], self.token, 0)
        return Drafts(
            tokens=tokens,
            lens=lens,
            confidence=None if self.confidence is None else np.full(shape, self.confidence, dtype=np.float32),
            signal=None if self.signal is None else np.full(shape, self.signal, dtype=np.float32),
            q=torch.full((*shape, VOCAB), 1 / VOCAB) if self.q else None,
            early_exit=lens > 2,
            rows_per_pass=tuple([int((lens > j).sum()) for j in range(shape[1])]) if self.q else (),
            kv_skipped=self.token,
            kv_redone=2 * self.token,
            skipped={batch.ids[0]: f"stub {self.token}"},
        )

    def advance(self, step: object) -> None:
        self.calls.append(("advance", step))

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        self.calls.append(("admit", lane, tuple(cached_blocks), cache_salt))

    def evict(self, lane: int) -> None:
        self.calls.append(("evict", lane))


def router(*stubs: Stub) -> Router:
    return Router([FaultBarrier(stub, VOCAB, lambda kind: None, TargetPassTimer(), lambda: 0.0) for stub in stubs])


def test_each_request_is_drafted_for_by_the_one_named() -> None:
    model, lookup = Stub(3, q=True, confidence=0.5), Stub(5)
    rule = StopRule((0.1,), signal="survival", offset=(0.0, 1.0, 2.0, 3.0))
    drafts = router(model, lookup).propose(
        batch([1], [2, 2], [3], [4, 4], lanes=[4, 2, 7, 0]), plan(1, 3, 0, 2, stop=rule, proposer=(0, 1, 1, 0))
    )
    assert drafts.tokens.tolist() == [[3, 0, 0], [5, 5, 5], [0, 0, 0], [3, 3, 0]]
    assert drafts.lens.tolist() == [1, 3, 0, 2]
    assert drafts.early_exit is not None
    assert drafts.early_exit.tolist() == [False, True, False, False]
    assert drafts.rows_per_pass == (2, 1)
    assert (drafts.kv_skipped, drafts.kv_redone) == (8, 16)
    assert drafts.skipped == {"a": "stub 3", "b": "stub 5"}
    assert [list(b.ids) for b in model.batches + lookup.batches] == [["a", "d"], ["b"]]
    assert model.batches[0].lanes.tolist() == [4, 0]
    assert lookup.batches[0].lengths.tolist() == [2]
    stops = [p.stop for p in model.plans + lookup.plans]
    assert [stop and stop.offset for stop in stops] == [(0.0, 3.0), (1.0,)]


def test_confidence_is_missing_where_a_proposer_has_none() -> None:
    two = router(Stub(3, confidence=0.5), Stub(5))
    confidence = two.propose(batch([1], [2]), plan(2, 1, proposer=(1, 0))).confidence
    assert confidence is not None
    assert np.isnan(confidence[0]).all()
    assert confidence[1, 0] == 0.5
    assert router(Stub(3), Stub(5)).propose(batch([1], [2]), plan(2, 1, proposer=(1, 0))).confidence is None


def test_evidence_is_missing_where_a_proposer_has_none() -> None:
    everyone, granted = batch([1], [2], [3]), plan(3, 1, 2, proposer=(1, 0, 0))
    one = router(Stub(3, confidence=0.5, signal=-1.5), Stub(5)).propose(everyone, granted)
    assert one.signal is not None
    assert np.isnan(one.signal[0]).all()
    assert one.signal[1, 0] == -1.5
    assert one.signal[2, :2].tolist() == [-1.5, -1.5]
    assert one.signal.dtype == np.float32
    assert one.lens.tolist() == [3, 1, 2]  # what was missing before merging only is no fault
    both = router(Stub(3, signal=-1.5), Stub(5, signal=4.0)).propose(everyone, granted)
    assert both.signal is not None
    assert [both.signal[i, :n].tolist() for i, n in enumerate((3, 1, 2))] == [[4.0] * 3, [-1.5], [-1.5] * 2]
    assert both.confidence is None
    for stubs in ((Stub(3, confidence=0.5), Stub(5)), (Stub(3), Stub(5))):
        assert router(*stubs).propose(everyone, granted).signal is None


def test_one_that_drafts_alone_gets_the_batch_as_it_is() -> None:
    stubs = Stub(3, q=True), Stub(5)
    everyone, granted = batch([1], [2]), plan(2, 0, proposer=(1, 0))
    assert router(*stubs).propose(everyone, granted).q is None
    assert stubs[1].batches == [everyone]
    assert stubs[1].plans == [granted]
    assert stubs[0].batches == []


def test_nothing_granted_is_nothing_drafted() -> None:
    stubs = Stub(3), Stub(5)
    drafts = router(*stubs).propose(batch([1], [2]), plan(0, 0, proposer=(1, 0)))
    assert (drafts.lens.tolist(), drafts.tokens.shape) == ([0, 0], (2, 0))
    assert stubs[0].batches == stubs[1].batches == []


def test_all_follow_every_request() -> None:
    stubs = Stub(3, q=True), Stub(5)
    both = router(*stubs)
    everyone = batch([1], [2])
    assert both.lag(everyone) == ((3, 3), (5, 5))
    assert view_columns(both.peek(everyone)) == (None, ((1, 5), (1, 5)))
    step = target([0], [2], [0])
    both.admit(1, (4, 5), "salt")
    both.advance(step)
    both.evict(1)
    assert stubs[0].calls == stubs[1].calls == [("admit", 1, (4, 5), "salt"), ("advance", step), ("evict", 1)]


def test_one_fails_alone() -> None:
    stubs = Stub(3), Stub(5)
    both = router(*stubs)
    stubs[0].broken = True
    for _ in range(2):  # the second time it is not asked
        drafts = both.propose(batch([1], [2]), plan(2, 1, proposer=(0, 1)))
        assert drafts.lens.tolist() == [0, 1]
        assert drafts.tokens[1, 0] == 5
    assert drafts.skipped == {"a": "proposer_fault", "b": "stub 5"}
    drafts = both.propose(batch([1], [2]), plan(2, 1, proposer=(1, 1)))
    assert drafts.lens.tolist() == [2, 1]


def _part(tokens: Sequence[int], q: torch.Tensor | None) -> Drafts:
    return Drafts(tokens=np.array([tokens]), lens=np.array([len(tokens)]), q=q)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_certain_drafts_are_verified_alike_with_and_without_company(seed: int) -> None:
    """Bit for bit: a one-hot q accepts and replaces as no q does."""
    rng = np.random.default_rng(seed)
    state = SamplerState(2, VOCAB)
    for lane in range(2):
        params = SamplingParams(temperature=1.0)
        state.add(lane, params, seed=seed + lane, n_index=0, eos_token_ids=(), bad_words=(), prompt=())
    certain = rng.integers(0, VOCAB, 3).tolist()
    q = torch.from_numpy(rng.dirichlet(np.ones(VOCAB), (1, 2)).astype(np.float32))
    drawn = [int(rng.choice(VOCAB, p=row / row.sum())) for row in q[0].double().numpy()]
    scores = torch.from_numpy(rng.normal(0.0, 3.0, (7, VOCAB)).astype(np.float32))
    merged = merge(2, [([1], _part(certain, None)), ([0], _part(drawn, q))])
    assert merged.q is not None
    lanes, depth = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2, 3])
    together = accept_chain(scores, Rows(lanes, lanes, depth, merged.tokens), merged, merged.lens, state)
    alone = _part(certain, None)
    rows = Rows(lanes[3:], np.zeros(4, dtype=np.int64), depth[3:], alone.tokens)
    expected = accept_chain(scores[3:], rows, alone, alone.lens, state)
    assert together.accepted[1] == expected.accepted[0]
    assert together.tokens[1].tolist() == expected.tokens[0].tolist()
    first = _part(drawn, q)
    rows = Rows(lanes[:3], lanes[:3], depth[:3], first.tokens)
    expected = accept_chain(scores[:3], rows, first, first.lens, state)
    assert together.accepted[0] == expected.accepted[0]
    assert together.tokens[0, :3].tolist() == expected.tokens[0].tolist()


def test_drafts_without_a_distribution_stay_without() -> None:
    merged = merge(3, [([0], _part([1], None)), ([2], _part([1, 2], None))])
    assert merged.q is None
    assert merged.tokens.tolist() == [[1, 0], [0, 0], [1, 2]]


def test_chains_beside_trees_become_trees_without_branches() -> None:
    tree = Drafts(
        np.array([[1, 2, 3, 4]]),
        np.array([4]),
        confidence=np.full((1, 4), 0.5, np.float32),
        parents=np.array([[-1, -1, 0, 1]]),
        early_exit=np.array([True]),
    )
    chain = Drafts(np.array([[5, 6], [7, 0]]), np.array([2, 1]))
    merged = merge(4, [([1], tree), ([0, 3], chain)])
    assert merged.parents is not None
    assert merged.lens.tolist() == [2, 4, 0, 1]
    assert merged.parents[1].tolist() == [-1, -1, 0, 1]
    assert merged.parents[0, :2].tolist() == [-1, 0]
    assert merged.parents[3, :1].tolist() == [-1]
    assert merged.tokens[0, :2].tolist() == [5, 6]
    assert merged.tokens[1].tolist() == [1, 2, 3, 4]
    assert merged.q is None
    wanted = replace(plan(2, 2, 0, 1), nodes=(4, 4, 0, 4), tree=TreeRule(2))
    assert not nonsense(replace(merged, confidence=None), wanted, VOCAB).any()


def test_chains_alone_stay_chains() -> None:
    chain = Drafts(np.array([[5, 6]]), np.array([2]))
    assert merge(2, [([0], chain), ([1], chain)]).parents is None
