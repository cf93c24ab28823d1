from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dynaspec.bench.rollout import draft_everywhere, run_lengths
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.kv.arena import Arena
from dynaspec.model.base import Model
from dynaspec.model.batch import BLOCK_SIZE
from dynaspec.model.loader import load_model
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.propose.draft_model import DraftModel
from dynaspec.sampling.state import SamplerState
from support.checkpoints import VOCAB
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
