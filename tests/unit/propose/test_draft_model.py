from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.kv.blocks import Arena
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.propose.drafter import DraftModel
from dynaspec.propose.guard import FaultBarrier, TargetPassTimer
from dynaspec.sampling.state import SamplerState
from unit.engine.fakes import VOCAB, FakeModel, Read, plain_decode, prompt, text_hash
from unit.propose.batches import Batch, batch, block_tables, plan, target


class Desk:
    """A proposer with two lanes' texts; plays the engine's and the target's part."""

    def __init__(self, *sizes: int, temperature: float = 0.0, **options: int) -> None:
        self.texts = [prompt(size, i) for i, size in enumerate(sizes)]
        self.tables = block_tables()
        self.sampler = SamplerState(4, VOCAB)
        self.model = FakeModel()
        arena = Arena.allocate(1, self.model.kv_shapes(40), torch.float32, torch.device("cpu"))
        self.proposer = AutoregressiveProposer(
            DraftModel(self.model, arena), self.tables, self.sampler, **{"max_length": 256, **options}
        )
        for lane, text in enumerate(self.texts):
            self.seat(lane, SamplingParams(temperature=temperature))
            assert self.tables.try_open(lane, [], len(text))
            self.proposer.admit(lane, (), "")

    def seat(self, lane: int, params: SamplingParams) -> None:
        self.sampler.add(lane, params, seed=lane, n_index=0, eos_token_ids=(), bad_words=(), prompt=())

    def propose(self, *depth: int, stop: StopRule | None = None, gate: float = 0.0, probe_context: int = 0) -> Drafts:
        for lane, k in enumerate(depth):
            assert self.tables.try_grow(lane, len(self.texts[lane]) + k)
        self.model.reads.clear()
        self.model.rows.clear()
        return self.proposer.propose(self.batch(), plan(*depth, stop=stop, gate=gate, probe_context=probe_context))

    def batch(self) -> Batch:
        return batch(*self.texts, tables=self.tables)

    def commit(self, drafts: Drafts, *accepted: int) -> None:
        lengths = [len(text) for text in self.texts]
        self.proposer.advance(target(range(len(lengths)), lengths, accepted))
        for i, n in enumerate(accepted):
            self.texts[i] += [*drafts.tokens[i, :n].tolist(), 30]

    @property
    def lags(self) -> tuple[int, ...]:
        return self.proposer.lag(self.batch())


def rows(reads: Sequence[Read]) -> list[int]:
    return [len(read.tokens) - read.context for read in reads]


def test_drafts_are_the_models_own_continuation() -> None:
    desk = Desk(20, 5)
    drafts = desk.propose(4, 2)
    assert drafts.lens.tolist() == [4, 2]
    assert drafts.tokens[0].tolist() == plain_decode(desk.texts[0], 4)
    assert drafts.tokens[1].tolist() == [*plain_decode(desk.texts[1], 2), 0, 0]
    assert drafts.early_exit is not None
    assert not drafts.early_exit.any()


def test_rows_that_have_drafted_all_leave_the_batch() -> None:
    desk = Desk(20, 5, 3)
    drafts = desk.propose(4, 1, 0)
    assert drafts.rows_per_pass == tuple(desk.model.rows) == (25, 1, 1, 1)
    assert [rows(reads) for reads in desk.model.reads] == [[20, 5], [1], [1], [1]]
    assert desk.lags == (0, 0, 2)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_after_full_acceptance_two_tokens_are_ingested(k: int) -> None:
    desk = Desk(20)
    desk.commit(desk.propose(k), k)
    assert desk.lags == (1,)
    desk.propose(2)
    assert rows(desk.model.reads[0]) == [2]
    assert desk.model.reads[0][0].tokens == desk.texts[0]


def test_after_a_rejection_only_the_targets_token_is_ingested() -> None:
    desk = Desk(20)
    desk.commit(desk.propose(6), 2)
    assert desk.lags == (0,)
    desk.propose(3)
    assert rows(desk.model.reads[0]) == [1]
    assert desk.model.reads[0][0].tokens == desk.texts[0]


def test_steps_without_speculation_are_caught_up_at_once() -> None:
    desk = Desk(20)
    desk.commit(desk.propose(3), 1)
    for _ in range(5):
        drafts = desk.propose(0)
        assert desk.model.reads == []
        desk.commit(drafts, 0)
    assert desk.lags == (5,)
    drafts = desk.propose(2)
    assert rows(desk.model.reads[0]) == [6]
    assert drafts.tokens[0].tolist() == plain_decode(desk.texts[0], 2)


def test_long_lags_are_caught_up_in_chunks_without_drafting() -> None:
    desk = Desk(20, 5, catch_up_tokens=8)
    seen = []
    for _ in range(3):
        drafts = desk.propose(2, 2)
        seen.append((rows(desk.model.reads[0]), drafts.lens.tolist(), drafts.skipped))
        desk.commit(drafts, 0, 0)
    assert seen == [
        ([5, 8], [0, 2], {"a": "catching_up"}),
        ([1, 8], [0, 2], {"a": "catching_up"}),
        ([6, 1], [2, 2], {}),
    ]
    assert drafts.tokens[0].tolist() == plain_decode(desk.texts[0][:-1], 2)


def test_all_may_be_catching_up() -> None:
    desk = Desk(20, catch_up_tokens=8)
    drafts = desk.propose(3)
    assert (drafts.lens.tolist(), drafts.tokens.shape, drafts.rows_per_pass) == ([0], (1, 0), (8,))
    assert desk.lags == (11,)


def test_requests_longer_than_the_drafters_positions_are_not_drafted_for() -> None:
    desk = Desk(20, 5, 18, max_length=20)
    drafts = desk.propose(3, 3, 3)
    assert drafts.lens.tolist() == [0, 3, 2]
    assert drafts.skipped == {"a": "drafter_length"}
    assert all(len(read.tokens) <= 20 for reads in desk.model.reads for read in reads)
    assert [len(reads) for reads in desk.model.reads] == [2, 2, 1]


def test_a_new_request_on_a_lane_starts_from_nothing() -> None:
    desk = Desk(20)
    desk.commit(desk.propose(3), 2)
    desk.proposer.evict(0)
    desk.proposer.admit(0, (), "")
    desk.texts[0] = prompt(9, 5)
    assert desk.lags == (8,)
    assert desk.propose(2).tokens[0].tolist() == plain_decode(desk.texts[0], 2)


def test_a_lane_that_has_just_changed_hands_lags_by_nothing_less() -> None:
    """Until the next step admits its request, the drafter knows the one before, which may have been longer."""
    desk = Desk(20, 7)
    desk.propose(3, 3)
    desk.texts[0] = prompt(9, 5)
    assert desk.lags == (0, 0)
    desk.proposer.admit(0, (), "")
    assert desk.lags == (8, 0)


def test_a_prefix_hit_is_not_ingested_again() -> None:
    desk = Desk(33)
    desk.propose(1)
    cached = desk.tables.blocks(0)[:2]
    desk.texts.append([*desk.texts[0][:32], 1, 2])
    desk.seat(1, SamplingParams(temperature=0.0))
    assert desk.tables.try_open(1, cached, 34)
    desk.proposer.admit(1, cached, "")
    drafts = desk.propose(0, 3)
    assert [(read.context, len(read.tokens)) for read in desk.model.reads[0]] == [(32, 34)]
    assert drafts.tokens[1].tolist() == plain_decode(desk.texts[1], 3)


@pytest.mark.parametrize("scope", ["request", "batch_mean"])
def test_the_stop_rule_is_honoured_between_passes(scope: str) -> None:
    desk = Desk(20, 5, 9)
    drafts = desk.propose(6, 6, 6, stop=StopRule((0.45,), scope))  # type: ignore[arg-type]
    assert drafts.confidence is not None
    signals = drafts.confidence
    for i, n in enumerate(drafts.lens.tolist()):
        assert drafts.early_exit is not None
        assert drafts.early_exit[i] == (n < 6)
        if scope == "request":
            assert (signals[i, : n - 1] >= 0.45).all()
            assert n == 6 or signals[i, n - 1] < 0.45
    if scope == "batch_mean":
        n = int(drafts.lens[0])
        assert drafts.lens.tolist() == [n] * 3
        assert (signals[:, : n - 1].mean(0) >= 0.45).all()
    assert len(desk.model.rows) == max(drafts.lens)
    assert desk.model.rows[1:] == [int((drafts.lens > j).sum()) for j in range(1, max(drafts.lens))]


def test_the_signal_is_the_raw_probability_whatever_the_temperature() -> None:
    drawn = StopRule((0.0,), signal="token_prob")
    a, b = (Desk(20, temperature=t).propose(1).confidence for t in (0.0, 2.0))
    c, d = (Desk(20, temperature=t).propose(1, stop=drawn).confidence for t in (0.0, 50.0))
    assert a is not None
    assert a.tolist() == b.tolist() == c.tolist()  # type: ignore[union-attr]
    assert d.tolist() < a.tolist()  # type: ignore[union-attr]


def raw_scores(text: Sequence[int]) -> torch.Tensor:
    """[V] logits of the next token, straight from the fake model's definition."""
    model, state = FakeModel(), text_hash(np.array(text, dtype=np.int64), np.arange(len(text)))[-1:]
    return model.logits(torch.from_numpy(state.astype(np.float32))[:, None])[0]


def heard(text: Sequence[int], token: int) -> float:
    """± log2(1 + n) for the longest, then latest, repetition of n ≤ 8 tokens before ``token``."""
    found = [
        (n, end)
        for n in range(1, 9)
        for end in range(n, len(text))
        if list(text[end - n : end]) == list(text[len(text) - n :])
    ]
    n, end = max(found, default=(0, 0))
    return math.log2(1 + n) * (1 if n and text[end] == token else -1)


SURVIVAL = StopRule((0.0,), signal="survival")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_evidence_is_how_far_ahead_the_token_is_and_what_the_text_has_said_before(temperature: float) -> None:
    desk = Desk(6, 40, 9, temperature=temperature)
    desk.texts[0] = [3, 4, 5, 3, 4, 5]
    drafts = desk.propose(5, 3, 0, stop=SURVIVAL)
    assert drafts.signal is not None
    assert drafts.signal.dtype == np.float32
    seen = []
    for i, n in enumerate(drafts.lens.tolist()):
        for j in range(n):
            text = [*desk.texts[i], *drafts.tokens[i, :j].tolist()]
            first, second = raw_scores(text).topk(2).values.tolist()
            over_all = raw_scores(text).softmax(-1).max().logit().clamp(-LOGIT_RANGE, LOGIT_RANGE).item()
            ahead = (min(first - second, LOGIT_RANGE) + over_all) / 2
            repeat_bonus = heard(text, int(drafts.tokens[i, j]))
            seen.append(repeat_bonus)
            assert drafts.signal[i, j] == pytest.approx(ahead + 0.2 * repeat_bonus, abs=1e-4)
    assert len(seen) == 8
    assert any(seen)


def test_a_lead_counts_up_to_a_limit_only() -> None:
    desk = Desk(20)
    desk.texts[0] = list(range(20))  # nothing is said twice
    desk.model.logits = lambda hidden: torch.eye(VOCAB)[[31]] * 50.0  # type: ignore[method-assign]
    drafts = desk.propose(1, stop=SURVIVAL)
    assert drafts.signal is not None
    assert drafts.signal.tolist() == [[LOGIT_RANGE]]
    assert drafts.confidence is not None
    assert drafts.confidence[0, 0] > 0.9999


@pytest.mark.parametrize("stop", [None, StopRule((0.0,)), StopRule((0.0,), signal="token_prob")])
def test_evidence_is_gathered_only_for_a_rule_that_reads_it(stop: StopRule | None) -> None:
    assert Desk(20).propose(3, stop=stop).signal is None


@pytest.mark.parametrize("below", [0.3, 0.6, 0.9])
def test_survival_stops_by_the_evidence_told(below: float) -> None:
    desk = Desk(20, 5, 9)
    rule = StopRule((below,), signal="survival", weight=0.8, bias=(0.5, -0.5), offset=(0.0, 1.0, -1.0))
    drafts = desk.propose(6, 6, 6, stop=rule)
    assert drafts.signal is not None
    lens = []
    for row, offset in zip(drafts.signal.tolist(), rule.offset, strict=True):
        score = 0.8 * np.array(row) + np.array([0.5, *[-0.5] * 5]) + offset
        fell = np.cumprod(1 / (1 + np.exp(-score))) < below
        lens.append(int(fell.argmax()) + 1 if fell.any() else 6)
    # Behind a draft's end its signal is 0, which changes nothing of where it ended.
    assert drafts.lens.tolist() == lens
    assert drafts.early_exit is not None
    assert drafts.early_exit.tolist() == [n < 6 for n in lens]


def test_q_is_what_was_drawn_from() -> None:
    desk = Desk(20, 5, temperature=0.7)
    drafts = desk.propose(3, 1)
    assert drafts.q is not None
    assert drafts.q.shape == (2, 3, VOCAB)
    assert torch.allclose(drafts.q[0].sum(-1), torch.ones(3))
    assert not drafts.q[1, 1:].any()
    for j in range(3):
        assert drafts.q[0, j, drafts.tokens[0, j]] > 0
    assert Desk(20).propose(3).q is None


def test_most_probable_drafts_have_no_distribution() -> None:
    desk = Desk(20, temperature=0.7, probabilistic=False)
    drafts = desk.propose(3)
    assert drafts.q is None
    assert drafts.tokens[0].tolist() == plain_decode(desk.texts[0], 3)


def test_greedy_rows_of_a_mixed_batch_are_no_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory may hold anything, also NaN."""
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, float("nan")))
    desk = Desk(20, 5)
    desk.seat(1, SamplingParams(temperature=0.8))
    guard = FaultBarrier(desk.proposer, VOCAB, lambda kind: None, TargetPassTimer(), lambda: 0.0, max_faults=1)
    for lane in (0, 1):
        assert desk.tables.try_grow(lane, 30)
    drafts = guard.propose(desk.batch(), plan(3, 3))
    assert guard.enabled
    assert drafts.lens.tolist() == [3, 3]


def test_offsets_belong_to_the_requests_that_draft() -> None:
    """Requests that draft nothing, or only catch up, have offsets as well."""
    desk = Desk(20, 5, 9, 30, catch_up_tokens=24)
    never, always = 20.0, -20.0
    rule = StopRule((0.5,), "request", "survival", 1.0, (), (always, never, always, always))
    drafts = desk.propose(0, 4, 4, 4, stop=rule)
    assert drafts.lens.tolist() == [0, 4, 1, 0]


@pytest.mark.parametrize("gate", [0.35, 0.5, 1.0])
def test_tokens_of_little_confidence_are_not_seen_by_later_ones(gate: float) -> None:
    desk = Desk(20, 5, 13)
    drafts = desk.propose(7, 5, 7, gate=gate)
    assert drafts.confidence is not None
    assert drafts.lens.tolist() == [7, 5, 7]
    skipped = 0
    for j, reads in enumerate(desk.model.reads[1:]):  # pass j processes drafted token j
        here = [i for i in range(3) if drafts.lens[i] > j + 1]
        for i, read in zip(here, reads, strict=True):
            kept = [t for t, c in zip(drafts.tokens[i, :j], drafts.confidence[i, :j], strict=True) if c >= gate]
            assert read.tokens == [*desk.texts[i], *kept, drafts.tokens[i, j]]
            assert read.context == len(desk.texts[i]) + len(kept)
            assert read.written == (drafts.confidence[i, j] >= gate)
            skipped += not read.written
    assert drafts.kv_skipped == skipped > 0
    assert drafts.kv_redone == 0


@pytest.mark.parametrize("gate", [0.35, 0.5, 1.0])
@pytest.mark.parametrize("accepted", range(7))
def test_what_was_gated_is_ingested_again_if_it_is_accepted(accepted: int, gate: float) -> None:
    desk = Desk(20)
    drafts = desk.propose(6, gate=gate)
    assert drafts.confidence is not None
    kept = int(np.append(drafts.confidence[0, :5] < gate, True).argmax())
    desk.commit(drafts, accepted)
    assert desk.lags == (accepted - min(kept, accepted),)
    for _ in range(2):
        desk.commit(desk.propose(0), 0)
    drafts = desk.propose(2)
    assert drafts.kv_redone == min(accepted, 5) - min(kept, accepted)
    assert drafts.kv_skipped == 0
    assert desk.model.reads[0][0].tokens == desk.texts[0]
    assert drafts.tokens[0].tolist() == plain_decode(desk.texts[0], 2)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_beyond_the_watermark_is_ever_read(seed: int) -> None:
    """Whatever is read is the committed text and the draft's own tokens, and exactly what is lacking is ingested."""
    rng = np.random.default_rng(seed)
    desk = Desk(*rng.integers(1, 40, 3).tolist(), catch_up_tokens=24)
    for _ in range(12):
        depth = [int(k) for k in rng.choice([0, 0, 1, 3, 5], 3)]
        lags = desk.lags
        drafts = desk.propose(*depth)
        working = [i for i in range(3) if depth[i]]
        order = sorted(working, key=lambda i: (lags[i] + 1 > 24, i))
        for j, reads in enumerate(desk.model.reads):
            here = order if j == 0 else [i for i in working if drafts.lens[i] > j]
            assert len(reads) == len(here)
            for i, read in zip(here, reads, strict=True):
                text = [*desk.texts[i], *drafts.tokens[i, : drafts.lens[i]].tolist()]
                assert read.tokens == text[: len(read.tokens)]
                ingested = len(read.tokens) - read.context
                assert ingested == (1 if j else min(lags[i] + 1, 24))
        desk.commit(drafts, *(int(rng.integers(0, n + 1)) for n in drafts.lens))


@pytest.mark.parametrize("seed", range(6))
def test_gating_that_comes_and_goes_leaves_no_wrong_kv(seed: int) -> None:
    """A committed token whose KV is out of place, or missing, would give other drafts."""
    rng = np.random.default_rng(seed)
    desk = Desk(*rng.integers(1, 40, 3).tolist(), catch_up_tokens=24)
    skipped = redone = 0
    for _ in range(25):
        gate = float(rng.choice([0.0, 0.4, 1.0]))
        drafts = desk.propose(*(int(k) for k in rng.choice([0, 0, 1, 3, 5], 3)), gate=gate)
        for i, n in enumerate(drafts.lens.tolist()):
            if n:  # the first token of a draft rests on committed ones alone
                assert drafts.tokens[i, 0] == plain_decode(desk.texts[i], 1)[0]
        skipped, redone = skipped + drafts.kv_skipped, redone + drafts.kv_redone
        desk.commit(drafts, *(int(rng.integers(0, n + 1)) for n in drafts.lens))
    assert 0 < redone < skipped
