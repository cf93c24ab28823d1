"""Decoding a known text under any rule, and the best rule in hindsight, against walks by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.bench.oracle_steps import (
    Iteration,
    KnownText,
    Passes,
    Signal,
    best_survival,
    best_threshold,
    best_threshold_per_position,
    confidence_alone,
    draft_everywhere,
    fit_acceptance,
    fit_costs,
    fixed,
    oracle,
    run_lengths,
    signal,
    step_s,
    stopped,
    survivals,
    tokens_per_second,
    total_s,
    walk,
)
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.propose.drafter import DraftModel
from dynaspec.sampling.state import SamplerState
from support.checkpoints import VOCAB
from unit.bench.texts import known
from unit.propose.batches import batch, block_tables, plan


@pytest.fixture(scope="module")
def drafter(tiny) -> Model:
    return load_model(tiny.drafter)


def proposed(drafter: Model, text: Sequence[int], k: int) -> Drafts:
    """What a request with this text is given, when nothing stops the draft."""
    tables, sampler = block_tables(size=BLOCK_SIZE), SamplerState(4, VOCAB)
    arena = Arena.allocate(drafter.config.num_layers, drafter.kv_shapes(40), drafter.dtype, torch.device("cpu"))
    proposer = AutoregressiveProposer(DraftModel(drafter, arena), tables, sampler, max_length=256)
    greedy = SamplingParams(temperature=0)
    sampler.add(0, greedy, seed=0, n_index=0, eos_token_ids=(), bad_words=(), prompt=())
    assert tables.try_open(0, [], len(text))
    proposer.admit(0, (), "")
    assert tables.try_grow(0, len(text) + k)
    with torch.inference_mode():
        return proposer.propose(batch(text, tables=tables), plan(k, stop=StopRule((0.0,), signal="survival")))


def test_runs():
    runs = run_lengths(np.array([True, False, True, True, True]))
    assert runs.tolist() == [1, 0, 3, 2, 1]


def test_drafts_from_every_position_are_those_from_each(drafter):
    """The shared blocks and the branches give bit for bit what a text of its own gives."""
    random = np.random.default_rng(0)
    prompt, text = random.integers(1, 320, 21).tolist(), random.integers(1, 320, 30).tolist()
    whole = draft_everywhere(drafter, prompt, text, 6)
    assert whole.confidence.shape == whole.signal.shape == (30, 6)
    for i in (0, 10, 11, 12, 29):
        alone = draft_everywhere(drafter, [*prompt, *text[:i]], [text[i]], 6)
        assert alone.confidence[0].tolist() == whole.confidence[i].tolist()
        assert alone.signal[0].tolist() == whole.signal[i].tolist()
        assert int(alone.runs[0]) == min(1, int(whole.runs[i]))


def test_signals_are_those_of_the_proposer(drafter):
    """Bit for bit, on a text in which some of what the drafter says was said before, and some otherwise."""
    said = proposed(drafter, [5, 6, 7], 12).tokens[0].tolist()
    prompt, text = [5, 6, 7, *said], [9, 5, 6, 7, *said[:8], *np.random.default_rng(0).integers(1, 320, 8).tolist()]
    rollouts = draft_everywhere(drafter, prompt, text, 8)
    repeat_bonuses = set()
    for i in range(len(text)):
        drafts = proposed(drafter, [*prompt, *text[:i]], 8)
        assert drafts.signal is not None
        assert drafts.confidence is not None
        assert drafts.repeat_bonus is not None
        assert rollouts.signal[i].tolist() == drafts.signal[0].tolist()
        assert rollouts.confidence[i].tolist() == drafts.confidence[0].tolist()
        run = drafts.tokens[0, : len(text) - i] == text[i : i + 8]
        assert min(int(rollouts.runs[i]), 8) == int(np.cumprod(run).sum())
        repeat_bonuses |= set(np.sign(drafts.repeat_bonus[0]).tolist())
    assert repeat_bonuses == {-1.0, 0.0, 1.0}


def test_a_lead_counts_up_to_a_limit_only(drafter, monkeypatch):
    """One token is all that is drafted: a text without it repeats nothing at first, and the others repeat that."""
    sure = torch.zeros(1, VOCAB)
    sure[0, 31] = 50.0
    monkeypatch.setattr(drafter, "logits", lambda hidden: sure.repeat(len(hidden), 1))
    rollouts = draft_everywhere(drafter, [1, 2, 3], [4, 5], 3)
    assert rollouts.signal[:, 0].tolist() == [LOGIT_RANGE] * 2
    assert rollouts.signal[:, 1].tolist() == [LOGIT_RANGE] * 2
    assert rollouts.signal[:, 2] == pytest.approx(LOGIT_RANGE + 0.2 * np.log2(2.0))


def test_a_text_that_does_not_fit(drafter):
    with pytest.raises(ConfigError, match="longer than the drafter's 256 positions"):
        draft_everywhere(drafter, [1] * 200, [1] * 50, 20)


COSTS = fit_costs({0: 1.0, 1: 1.1, 10: 2.0}, row_s=0.01, pass_s=0.09)

texts = st.lists(st.booleans(), min_size=1, max_size=40).map(known)


def test_a_walk_by_hand():
    #              0     1     2     3      4     5     6
    text = known([True, True, True, False, True, True, True])
    assert fixed(text, 2) == (Iteration(2, 2), Iteration(2, 2))  # 1 2 |3|, 4 5 |6|
    assert fixed(text, 1) == (Iteration(1, 1), Iteration(1, 0), Iteration(1, 1), Iteration(0, 0))
    assert oracle(text) == (Iteration(2, 2), Iteration(2, 2))
    assert fixed(text, 0) == (Iteration(0, 0),) * 6


def test_no_draft_goes_beyond_the_request():
    text = known([True] * 4)
    assert fixed(text, 9) == (Iteration(2, 2),)
    # A request that could have had more is drafted for to its own end, and accepts up to the text's.
    assert fixed(known([True] * 4, max_tokens=20), 9) == (Iteration(9, 2),)


@given(texts, st.integers(0, 12))
def test_every_token_is_emitted_once(text, k):
    for steps in (fixed(text, k), oracle(text)):
        assert Passes.of(steps).tokens == text.tokens - 1
        assert all(step.accepted <= step.drafted for step in steps)


@given(texts, st.integers(0, 12))
def test_the_oracle_wastes_nothing_and_needs_the_fewest_target_passes(text, k):
    best = oracle(text)
    assert all(step.drafted == step.accepted for step in best)
    assert Passes.of(best).target <= Passes.of(fixed(text, k)).target
    if best:
        assert tokens_per_second([best], COSTS) >= tokens_per_second([fixed(text, k)], COSTS) - 1e-9


def test_stopping_keeps_the_token_that_fell_below():
    signal = np.array([[0.9, 0.3, 0.9], [0.2, 0.9, 0.9], [0.9, 0.9, 0.9], [0.5, 0.4, 0.4]])
    assert stopped(signal, 0.5).tolist() == [2, 1, 3, 2]
    assert stopped(signal, [0.0, 0.0, 0.95]).tolist() == [3, 3, 3, 3]
    assert stopped(signal, 0.0).tolist() == [3, 3, 3, 3]


def test_costs_between_and_beyond_what_was_measured():
    found = [step_s(COSTS, k) for k in (0, 1, 4, 10, 20)]
    assert found == pytest.approx([1.0, 1.1, 1.4, 2.0, 3.0], rel=0.03)
    steps = (Iteration(0, 0), Iteration(1, 0), Iteration(1, 1))
    assert total_s(steps, COSTS) == pytest.approx(found[0] + 2 * found[1])


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=9))
def test_a_longer_draft_is_never_cheaper(noise):
    """A measurement that says so has met a busy machine."""
    costs = fit_costs({k: factor * (1.0 + 0.1 * k) for k, factor in enumerate(noise)}, row_s=0.01, pass_s=0.09)
    found = [step_s(costs, k) for k in range(20)]
    assert found == sorted(found)


def test_times_that_fit_are_those_measured():
    """The pass was timed a quarter too short, and rows cost more from a tile on."""
    measured = {k: 9.5 + 2.3 * k + (1.2 if k > 7 else 0.0) for k in (*range(9), 12, 16, 20)}
    costs = fit_costs(measured, row_s=0.2, pass_s=1.6)
    assert [step_s(costs, k) for k in measured] == pytest.approx(list(measured.values()), rel=0.02)


def test_what_was_looked_up_costs_a_row_and_no_pass() -> None:
    steps = (Iteration(6, 4, looked_up=6), Iteration(5, 2, looked_up=4))
    costs = fit_costs({k: 1.0 + 0.11 * k for k in range(9)}, row_s=0.01, pass_s=0.1)
    assert total_s(steps, costs) == pytest.approx(1.06 + 1.15, rel=0.02)
    assert Passes.of(steps) == Passes(target=2, drafter=1, tokens=8)


HINDSIGHT_COSTS = fit_costs({0: 1.0, 1: 1.3, 10: 4.0}, row_s=0.02, pass_s=0.28)
LONGEST = 6


def everywhere(signal: np.ndarray) -> np.ndarray:
    """[n, longest] of a signal [n] that a token has whichever draft it is in."""
    return np.stack([np.roll(signal, -j) for j in range(LONGEST)], axis=1)


def telling(n: int = 300) -> KnownText:
    """Confidence says exactly how likely a token is right; signal says nothing."""
    random = np.random.default_rng(1)
    signal = random.uniform(0.02, 0.98, n)
    return known((random.random(n) < signal).tolist(), everywhere(signal))


def with_evidence(text: KnownText, found: np.ndarray) -> KnownText:
    return replace(text, rollouts=replace(text.rollouts, signal=found))


def all_seeing(text: KnownText) -> KnownText:
    """Evidence says which tokens are right."""
    right = np.arange(LONGEST) < text.rollouts.runs[:, None]
    return with_evidence(text, np.where(right, LOGIT_RANGE, -1.0))


def test_hindsight_uses_the_signal():
    text = [telling()]
    best_fixed = max(tokens_per_second([fixed(text[0], k)], HINDSIGHT_COSTS) for k in range(LONGEST + 1))
    common, by_position = (f(text, HINDSIGHT_COSTS) for f in (best_threshold, best_threshold_per_position))
    survival = best_survival(text, HINDSIGHT_COSTS, confidence_alone)
    bound = tokens_per_second([oracle(text[0])], HINDSIGHT_COSTS)
    assert best_fixed < common.tokens_per_second <= by_position.tokens_per_second < bound
    assert best_fixed < survival.tokens_per_second < bound
    for rule in (by_position, survival):
        found = tokens_per_second([walk(text[0], rule.lengths[0])], HINDSIGHT_COSTS)
        assert rule.tokens_per_second == pytest.approx(found)


def conditional(texts: list[KnownText], told: Signal) -> np.ndarray:
    """[n, longest] fitted chance of each token of the first text."""
    survival = survivals(texts, told)[0]
    return survival / np.column_stack([np.ones(len(survival)), survival[:, :-1]])


def test_a_calibrated_signal_has_weight_one():
    """Each token is as likely as its confidence says."""
    text = telling(3000)
    with_signal = with_evidence(text, confidence_alone(text.rollouts))
    for texts, told in (([text], confidence_alone), ([with_signal], signal)):
        assert fit_acceptance(texts, told).head[1] == pytest.approx(1.0, abs=0.15)
        assert conditional(texts, told)[:, :4] == pytest.approx(text.rollouts.confidence[:, :4], abs=0.06)


def test_a_signal_that_says_nothing_has_no_weight():
    assert fit_acceptance([telling()], signal).head[1] == 0.0
    noise = np.random.default_rng(3).normal(size=(3000, LONGEST))
    assert fit_acceptance([with_evidence(telling(3000), noise)], signal).head[1] == pytest.approx(0.0, abs=0.1)


def test_without_a_signal_the_position_tells():
    """Drafts that get worse with every token."""
    random = np.random.default_rng(2)
    chance = np.array([0.9, 0.7, 0.5, 0.3, 0.3, 0.3])
    right = random.random((4000, LONGEST)) < chance
    text = known([True] * 4000, np.full((4000, LONGEST), 0.5))
    runs = np.cumprod(right, axis=1).sum(axis=1)
    text = replace(text, rollouts=replace(text.rollouts, runs=runs))
    assert conditional([text], signal)[0] == pytest.approx(chance, abs=0.06)


def test_a_signal_is_not_cut():
    """Halving what is told doubles its weight, wherever it lies: nothing is clipped on the way."""
    found = 4.0 * confidence_alone(telling(3000).rollouts)
    assert np.abs(found).max() > 2 * LOGIT_RANGE
    texts = [[with_evidence(telling(3000), scale * found)] for scale in (1.0, 0.5)]
    wide, narrow = (fit_acceptance(each, signal) for each in texts)
    assert narrow.head[1] == pytest.approx(2.0 * wide.head[1], rel=5e-3)
    assert conditional(texts[0], signal) == pytest.approx(conditional(texts[1], signal), abs=5e-3)


def test_where_the_evidence_is_the_confidence_both_rules_are_one():
    text = telling()
    texts = [with_evidence(text, confidence_alone(text.rollouts))]
    by_evidence, by_confidence = (best_survival(texts, HINDSIGHT_COSTS, told) for told in (signal, confidence_alone))
    assert by_evidence.tokens_per_second == by_confidence.tokens_per_second
    assert by_evidence.thresholds == by_confidence.thresholds
    assert by_evidence.lengths[0].tolist() == by_confidence.lengths[0].tolist()


def test_evidence_that_knows_all_wastes_the_one_token_that_it_stops_at():
    text = all_seeing(telling())
    rule = best_survival([text], HINDSIGHT_COSTS, signal)
    steps = walk(text, rule.lengths[0])
    assert all(step.drafted - step.accepted <= 1 for step in steps)
    # Its passes are those of the oracle that may draft as far as it.
    far = walk(text, np.minimum(text.rollouts.runs, LONGEST))
    assert Passes.of(steps).target == Passes.of(far).target
    assert rule.tokens_per_second > best_survival([text], HINDSIGHT_COSTS, confidence_alone).tokens_per_second


def test_certainty_is_a_finite_logit():
    text = known([True, False, True], np.array([[0.0, 0.5, 1.0]] * 3))
    assert confidence_alone(text.rollouts) == pytest.approx(np.array([[-LOGIT_RANGE, 0.0, LOGIT_RANGE]] * 3))
