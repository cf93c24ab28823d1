"""First choices in one compiled call: the same drafts as each part by itself gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import Drafts, Ints
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import StopRule
from dynaspec.propose.drawing import Drawn, FirstChoices
from dynaspec.propose.passes import DraftPasses, draft_passes
from dynaspec.sampling.state import SamplerState
from unit.propose.batches import Batch, batch

VOCAB, LONGEST = 32, 6
CPU = torch.device("cpu")
DRAFTING = np.array([0, 2, 3])
GRANTED = np.array([6, 3, 5])

RULES = {
    "none": None,
    "confidence": StopRule(below=(0.3, 0.5)),
    "mean": StopRule(below=(0.45,), scope="batch_mean"),
    "token_prob": StopRule(below=(0.5,), signal="token_prob"),
    "survival": StopRule(
        below=(0.1, 0.2),
        signal="survival",
        weight=0.8,
        bias=(0.4, 0.2, -0.1),
        offset=(0.5, 0.0, -0.5),
        total_below=(0.2, 0.6),
    ),
}


def sampler(temperature: float = 0.0) -> SamplerState:
    state = SamplerState(4, VOCAB)
    for lane in range(4):
        params = SamplingParams(temperature=temperature)
        state.add(lane, params, seed=lane, n_index=0, eos_token_ids=(), bad_words=(), prompt=())
    return state


def texts() -> Batch:
    """Four that repeat themselves now and then, so that there are repeat_bonuses."""
    rng = np.random.default_rng(3)
    return batch(*(rng.integers(0, 4, size).tolist() for size in (40, 25, 60, 33)))


def drafts(passes: DraftPasses, seed: int) -> tuple[Drafts, list[list[int]]]:
    rng = np.random.default_rng(seed)
    running: Ints = np.arange(DRAFTING.size)
    seen = []
    for done in range(1, LONGEST + 1):
        logits = torch.from_numpy(rng.normal(scale=3.0, size=(DRAFTING.size, VOCAB)).astype(np.float32))
        logits[:, :4] += 4.0  # tokens of the texts
        running = passes.take(logits[running], running, done)
        seen.append(running.tolist())
        if not running.size:
            break
    granted = np.zeros(4, np.int64)
    granted[DRAFTING] = GRANTED
    return passes.finish(granted), seen


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("seed", range(5))
def test_one_call_gives_what_its_parts_give(rule: StopRule | None, seed: int) -> None:
    made = Drawn(sampler(), texts(), DRAFTING, GRANTED, rule, VOCAB, CPU, most_probable=True, first_choice=True)
    parts, ran = drafts(made, seed)
    whole, ran_too = drafts(FirstChoices(texts(), DRAFTING, GRANTED, rule), seed)
    assert ran_too == ran
    assert whole.lens.tolist() == parts.lens.tolist()
    np.testing.assert_array_equal(whole.tokens, parts.tokens)
    assert whole.early_exit is not None
    assert parts.early_exit is not None
    assert whole.early_exit.tolist() == parts.early_exit.tolist()
    for mine, other in (
        (whole.confidence, parts.confidence),
        (whole.signal, parts.signal),
        (whole.repeat_bonus, parts.repeat_bonus),
    ):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            drafted = np.arange(LONGEST) < whole.lens[:, None]
            np.testing.assert_array_equal(mine[drafted], other[drafted])


def test_rules_do_stop_drafts_here() -> None:
    """Or the test above would compare nothing but full drafts."""
    for rule in RULES.values():
        lens = [drafts(FirstChoices(texts(), DRAFTING, GRANTED, rule), seed)[0].lens.tolist() for seed in range(5)]
        assert (lens == [[6, 0, 3, 5]] * 5) == (rule is None)


@pytest.mark.parametrize(
    ("temperature", "probabilistic", "one_call"), [(0.0, True, True), (0.8, True, False), (0.0, False, True)]
)
def test_only_first_choices_are_taken_in_one_call(temperature: float, probabilistic: bool, one_call: bool) -> None:
    made = draft_passes(sampler(temperature), texts(), DRAFTING, GRANTED, None, VOCAB, CPU, probabilistic=probabilistic)
    assert isinstance(made, FirstChoices) == one_call
