"""A whole draft in one compiled call: what the same passes give one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import StopRule
from dynaspec.kv.blocks import Arena
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.propose.drafter import DraftModel
from dynaspec.propose.own_vocabulary import OwnTexts, SharedVocabulary, Translation
from dynaspec.sampling.state import SamplerState
from unit.model import tiny
from unit.propose.batches import batch, block_tables, plan, target
from unit.propose.tokenizers import Bytes, Words

SIZES = (20, 5, 33, 16)
RULES = {
    "none": None,
    "confidence": StopRule(below=(0.3, 0.6)),
    "mean": StopRule(below=(0.5,), scope="batch_mean"),
    "survival": StopRule(
        below=(0.3, 0.1), signal="survival", bias=(0.5, -0.2), offset=(1.0, 0.0, -0.5, 0.0), total_below=(0.1,)
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(tiny.write(tmp_path_factory.mktemp("tiny"))))


class Desk:
    """A proposer over four growing texts, and its target."""

    def __init__(self, model: Model, *, most: int = 512) -> None:
        self.texts = [np.random.default_rng(i).integers(3, 50, size).tolist() for i, size in enumerate(SIZES)]
        self.tables, sampler = block_tables(), SamplerState(len(SIZES), 50)
        self.arena = Arena.allocate(2, model.kv_shapes(40), torch.float32, torch.device("cpu"))
        self.proposer = AutoregressiveProposer(
            DraftModel(model, self.arena), self.tables, sampler, max_length=64, catch_up_tokens=most
        )
        for lane, text in enumerate(self.texts):
            sampler.add(
                lane, SamplingParams(temperature=0), seed=0, n_index=0, eos_token_ids=(), bad_words=(), prompt=()
            )
            assert self.tables.try_open(lane, [], len(text))
            self.proposer.admit(lane, (), "")

    def step(self, depth: tuple[int, ...], rule: StopRule | None, accepted: tuple[int, ...]) -> Drafts:
        for lane, k in enumerate(depth):
            assert self.tables.try_grow(lane, len(self.texts[lane]) + k)
        drafts = self.proposer.propose(batch(*self.texts, tables=self.tables), plan(*depth, stop=rule))
        right = np.minimum(drafts.lens, accepted)
        self.proposer.advance(target(range(len(SIZES)), [len(text) for text in self.texts], right.tolist()))
        for lane, n in enumerate(right.tolist()):
            self.texts[lane] += [*drafts.tokens[lane, :n].tolist(), 7]
        return drafts


STEPS = [
    ((4, 2, 6, 1), (4, 0, 3, 1)),
    ((0, 5, 1, 3), (0, 2, 1, 0)),
    ((3, 3, 3, 3), (1, 3, 0, 2)),
    ((6, 0, 0, 0), (6, 0, 0, 0)),
]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_drafts_and_kv_are_those_of_single_passes(model: Model, rule: StopRule | None) -> None:
    compiled, single = Desk(model), Desk(model)
    assert compiled.proposer._chain is not None
    single.proposer._chain = None
    for depth, accepted in STEPS:
        whole = compiled.step(depth, rule, accepted)
        parts = single.step(depth, rule, accepted)
        for name in ("tokens", "lens", "confidence", "signal", "repeat_bonus", "early_exit"):
            mine, other = getattr(whole, name), getattr(parts, name)
            assert (mine is None) == (other is None)
            if mine is not None:
                np.testing.assert_array_equal(mine, other, name)
        assert whole.rows_per_pass == parts.rows_per_pass
        assert whole.kv_redone == parts.kv_redone
        np.testing.assert_array_equal(compiled.proposer._marks.seen, single.proposer._marks.seen)
    assert compiled.texts == single.texts
    for mine, other in zip(compiled.arena.layers, single.arena.layers, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])


class OwnTokensDesk(Desk):
    """The same for a drafter whose tokens are letters and pairs of letters; the target's are bytes."""

    def __init__(self, model: Model, *, any_tokens: bool) -> None:
        super().__init__(model)
        letters = [*"abcdefghijklmnopqrstuvwxyz"]
        own, target = Words(*letters[1:], *map("".join, pairwise(letters))), Bytes()
        shared = SharedVocabulary.of(own.spellings(), target.spellings(), 50, 256)
        translation = Translation(target, own, None if any_tokens else shared, 3, 3)
        texts = OwnTexts(translation, len(SIZES), 40, self.tables.block_size, 64, caching=True)
        sampler = SamplerState(len(SIZES), 256)
        self.proposer = AutoregressiveProposer(
            DraftModel(model, self.arena, translation=translation), self.tables, sampler, max_length=64, texts=texts
        )
        self.texts = [np.random.default_rng(i).integers(98, 123, size).tolist() for i, size in enumerate(SIZES)]
        for lane in range(len(SIZES)):
            sampler.add(
                lane, SamplingParams(temperature=0), seed=0, n_index=0, eos_token_ids=(), bad_words=(), prompt=()
            )
            self.proposer.admit(lane, (), "")

    def step(self, depth: tuple[int, ...], rule: StopRule | None, accepted: tuple[int, ...]) -> Drafts:
        drafts = super().step(depth, rule, accepted)
        for text in self.texts:
            text[-1] = ord("b")  # what the target adds
        return drafts


@pytest.mark.parametrize("any_tokens", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_they_are_so_in_tokens_of_its_own(model: Model, rule: StopRule | None, any_tokens: bool) -> None:
    compiled, single = (OwnTokensDesk(model, any_tokens=any_tokens) for _ in range(2))
    assert compiled.proposer._chain is not None
    single.proposer._chain = None
    drafted = 0
    for depth, accepted in STEPS:
        whole = compiled.step(depth, rule, accepted)
        parts = single.step(depth, rule, accepted)
        for name in ("tokens", "lens", "confidence", "early_exit"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name), name)
        assert whole.rows_per_pass == parts.rows_per_pass
        np.testing.assert_array_equal(compiled.proposer._marks.seen, single.proposer._marks.seen)
        drafted += int(whole.lens.sum())
        assert set(whole.tokens[whole.tokens > 0].tolist()) <= set(range(97, 123))
    assert drafted > 8
    for mine, other in zip(compiled.arena.layers, single.arena.layers, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])


def test_on_the_targets_kv_nothing_is_read_but_the_newest_token(model: Model) -> None:
    desk = Desk(model)
    drafter = DraftModel(model, desk.arena, targets_kv=True)
    desk.proposer = AutoregressiveProposer(drafter, desk.tables, SamplerState(len(SIZES), 50), max_length=64)
    assert desk.proposer.lag(batch(*desk.texts, tables=desk.tables)) == (0, 0, 0, 0)
    drafts = desk.step((2, 2, 0, 2), None, (1, 0, 0, 2))
    assert drafts.rows_per_pass == (3, 3)
    drafts = desk.step((1, 1, 3, 1), None, (0, 0, 0, 0))
    assert drafts.rows_per_pass == (4, 1, 1)


def test_only_what_python_need_not_look_at_is_one_call(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    desk = Desk(model, most=16)
    chain = desk.proposer._chain
    assert chain is not None
    monkeypatch.setattr(desk.proposer, "_chain", lambda *args: calls.append(1) or chain(*args))
    desk.step((2, 2, 2, 2), None, (0, 0, 0, 0))  # two lack more than 16 tokens
    assert not calls
    desk.step((2, 2, 0, 2), None, (0, 0, 0, 0))
    assert calls
    calls.clear()
    view = batch(*desk.texts, tables=desk.tables)
    desk.proposer.propose(view, plan(1, 1, 0, 0, gate=0.5))
    desk.proposer.propose(view, plan(1, 1, 0, 0, probe_context=8))
    assert not calls
