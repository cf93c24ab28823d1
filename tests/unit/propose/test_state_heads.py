"""Heads without KV as a proposer: from which state they draft, how far, and what their passes cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import StopRule
from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.model.state_heads.medusa import load_medusa
from dynaspec.model.state_heads.mlp_speculator import load_mlp_speculator
from dynaspec.model.taps import Taps
from dynaspec.propose.pass_timing import Runner, measure_costs
from dynaspec.propose.state_heads import StateHeadsDrafter, StateHeadsProposer, StateHeadsRunner
from dynaspec.sampling.state import SamplerState
from support.head_passes import states_of
from support.state_heads import LAYOUTS, Layout, random_tensors, reference, write
from unit.model import tiny
from unit.propose.batches import batch, block_tables, plan

BY_NAME = {layout.name: layout for layout in LAYOUTS}
KINDS = tuple(
    BY_NAME[name] for name in ("medusa 0.1, two layers", "vllm, some tokens", "accelerator, prefixed, scaled", "tied")
)
LOADERS = {"medusa": load_medusa, "mlp_speculator": load_mlp_speculator}
each_kind = pytest.mark.parametrize("layout", KINDS, ids=lambda layout: layout.name)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(str(tiny.write(tmp_path_factory.mktemp("tiny"))))


class Desk:
    """A proposer over growing texts, with the states of their target."""

    def __init__(
        self, model: Model, layout: Layout, path: Path, *, compiled: bool = True, max_length: int | None = None
    ) -> None:
        self.model, self.layout, self.tensors = model, layout, random_tensors(layout)
        heads = LOADERS[layout.method](str(write(layout, path)), model)
        self.texts = [np.random.default_rng(i).integers(3, 50, size).tolist() for i, size in enumerate((20, 2, 33, 17))]
        self.tables, sampler = block_tables(size=BLOCK_SIZE), SamplerState(4, 50)
        self.kv = Arena.allocate(2, model.kv_shapes(40), torch.float32, torch.device("cpu")).layers
        self.taps = Taps.allocate((3,), 40, 2, 32, torch.float32, torch.device("cpu"))
        self.taps.arena.fill_(torch.nan)
        drafter = StateHeadsDrafter(heads, METHODS[layout.method].traits, self.taps)
        self.proposer = StateHeadsProposer(drafter, self.tables, sampler, max_length=max_length)
        if not compiled:
            self.proposer._chain = None
        for lane, text in enumerate(self.texts):
            sampler.add(
                lane, SamplingParams(temperature=0), seed=0, n_index=0, eos_token_ids=(), bad_words=(), prompt=()
            )
            assert self.tables.try_open(lane, [], len(text))
            self.proposer.admit(lane, (), "")
            self.run(lane, text[:-1], 0)

    def run(self, lane: int, tokens: list[int], start: int) -> None:
        """The target's pass over tokens of a text."""
        at = np.arange(start, start + len(tokens), dtype=np.int64)
        table = self.tables.array[lane]
        self.model.forward(
            ForwardBatch(
                tokens=torch.tensor(tokens),
                positions=at,
                slots=table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE,
                query_start=np.array([0, len(tokens)], np.int32),
                context_lens=np.array([start], np.int32),
                block_tables=table[None].copy(),
            ),
            self.kv,
            self.taps,
        )

    def draft(self, *depth: int, stop: StopRule | None = None) -> Drafts:
        for lane, k in enumerate(depth):
            assert self.tables.try_grow(lane, len(self.texts[lane]) + k)
        return self.proposer.propose(batch(*self.texts, tables=self.tables), plan(*depth, stop=stop))

    def verify(self, drafts: Drafts, accepted: tuple[int, ...]) -> None:
        """The target tests all that was drafted; so many tokens are accepted, and another one follows."""
        for lane, (text, n) in enumerate(zip(self.texts, np.minimum(drafts.lens, accepted).tolist(), strict=True)):
            self.run(lane, [text[-1], *drafts.tokens[lane, : drafts.lens[lane]].tolist()], len(text) - 1)
            self.texts[lane] += [*drafts.tokens[lane, :n].tolist(), 7]

    def logits(self, lane: int, chain: list[int]) -> torch.Tensor:
        """[chain + 1, drafted vocabulary] of the plain reference."""
        text = self.texts[lane]
        states = states_of(self.model, text[:-1], (3,))
        return reference(self.layout, self.tensors, states[-1], [text[-1], *chain])

    @property
    def ids(self) -> torch.Tensor:
        return self.tensors.get("ids", torch.arange(self.layout.vocab))


STEPS = [
    ((3, 2, 1, 1), (3, 0, 1, 1)),
    ((0, 3, 1, 3), (0, 2, 1, 0)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
    ((3, 3, 3, 3), (1, 3, 0, 2)),
    ((3, 0, 0, 0), (2, 0, 0, 0)),
    ((2, 2, 2, 2), (1, 1, 1, 1)),
]


@each_kind
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "head by head"])
def test_drafts_are_those_of_the_plain_reference(layout: Layout, compiled: bool, model: Model, tmp_path: Path) -> None:
    """After rejections, full acceptance, and steps that drafted nothing; a text of two tokens among them."""
    desk = Desk(model, layout, tmp_path, compiled=compiled)
    for depth, accepted in STEPS:
        drafts = desk.draft(*depth)
        assert drafts.lens.tolist() == list(depth)
        for lane, k in enumerate(depth):
            chain = drafts.tokens[lane, :k].tolist()
            if k:
                chances = desk.logits(lane, chain[:-1]).softmax(-1)
                assert chain == desk.ids[chances.argmax(1)].tolist()
                assert drafts.confidence is not None
                np.testing.assert_allclose(drafts.confidence[lane, :k], chances.amax(1).numpy(), rtol=1e-4)
        desk.verify(drafts, accepted)


@each_kind
@pytest.mark.parametrize(
    "stop",
    [
        None,
        StopRule((0.3,)),
        StopRule((0.25, 0.4), scope="batch_mean"),
        StopRule((0.5, 0.4), signal="survival", bias=(0.5,), offset=(0.3, -0.2, 0.0, 0.1), total_below=(0.1,)),
    ],
    ids=["no rule", "each by itself", "mean", "survival"],
)
def test_compiled_drafts_are_those_of_single_heads(
    layout: Layout, stop: StopRule | None, model: Model, tmp_path: Path
) -> None:
    whole, parts = Desk(model, layout, tmp_path / "a"), Desk(model, layout, tmp_path / "b", compiled=False)
    ended = False
    for depth, accepted in STEPS:
        found, expected = whole.draft(*depth, stop=stop), parts.draft(*depth, stop=stop)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.lens.tolist() == expected.lens.tolist()
        assert found.rows_per_pass == expected.rows_per_pass
        for name in ("confidence", "signal", "repeat_bonus", "early_exit"):
            one, other = getattr(found, name), getattr(expected, name)
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one, other)
        ended |= bool(found.early_exit.any())  # type: ignore[union-attr]
        whole.verify(found, accepted)
        parts.verify(expected, accepted)
    assert ended == (stop is not None)


@each_kind
def test_nobody_gets_more_tokens_than_there_are_heads(layout: Layout, model: Model, tmp_path: Path) -> None:
    desk = Desk(model, layout, tmp_path)
    assert desk.proposer.traits == replace(METHODS[layout.method].traits, longest=layout.heads)
    drafts = desk.draft(9, 1, 0, 2)
    assert drafts.lens.tolist() == [layout.heads, 1, 0, 2]
    assert drafts.early_exit is not None
    assert not drafts.early_exit.any()
    passes = {"medusa": (3,), "mlp_speculator": (3, 2, *(1,) * (layout.heads - 2))}
    assert drafts.rows_per_pass == passes[layout.method]


def test_requests_that_cannot_be_drafted_for(model: Model, tmp_path: Path) -> None:
    """Longer than is drafted for; or nothing of them has been through the target."""
    desk = Desk(model, KINDS[0], tmp_path, max_length=21)
    desk.texts[1] = [7]
    drafts = desk.draft(3, 3, 3, 3)
    assert drafts.lens.tolist() == [1, 0, 0, 3]
    assert drafts.skipped == {"b": "drafter_length", "c": "drafter_length"}
    desk.texts[0], desk.texts[3] = [7] * 30, [7] * 30
    assert desk.draft(2, 2, 2, 2).lens.tolist() == [0, 0, 0, 0]


def test_nothing_is_ever_missing(model: Model, tmp_path: Path) -> None:
    desk = Desk(model, KINDS[0], tmp_path)
    assert desk.proposer.lag(batch(*desk.texts, tables=desk.tables)) == (0, 0, 0, 0)
    assert desk.proposer.needs.taps == (3,)
    assert not desk.proposer.needs.kv


@each_kind
def test_what_their_passes_cost_is_measured(layout: Layout, model: Model, tmp_path: Path) -> None:
    """A pass of Medusa's gives as many tokens a row as there are heads, one of an MLP speculator's one."""
    desk = Desk(model, layout, tmp_path)
    heads, each = desk.proposer._heads, layout.heads if layout.method == "medusa" else 1
    ran: list[tuple[int, int]] = []
    honest = type(heads).run

    def run(head: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append((head, len(tokens)))
        return honest(heads, head, state, tokens)

    heads.run = run  # type: ignore[method-assign]
    runner = StateHeadsRunner(heads, at_once=layout.method == "medusa")
    runner.run(4, context=256, passes=2)
    assert ran == [(n % layout.heads, 4) for n in range(2 * each)]
    seconds = iter(range(10_000))
    costs = measure_costs(Runner(model, Arena(desk.kv)), [runner], lambda: 1e-4 * next(seconds), 64)
    assert [rows for rows, _ in costs.drafters[0]] == [each, 4 * each, 16 * each]
    assert costs.first_s[0] > 0.0
