"""Trees that drafters grow, against a plain reference that reads each path from its beginning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.contract.step import SpecPlan, StopRule, TreeRule
from dynaspec.contract.tree import TokenTree
from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.propose.growth import add_nodes, as_drafts, grow, next_parents
from unit.propose.batches import batch, plan, target
from unit.propose.test_chain import SIZES, Desk, model

__all__ = ["model"]

SHAPE = TokenTree.parse([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)])
SURVIVAL = StopRule(
    below=(0.05, 0.02),
    signal="survival",
    weight=0.9,
    bias=(0.5, -0.2),
    offset=(1.0, 0.0, -0.5, 0.0),
    total_below=(0.1,),
)
Path = tuple[int, ...]


def tree_plan(depth: Path, nodes: Path, rule: TreeRule, stop: StopRule | None = None) -> SpecPlan:
    return replace(plan(*depth, stop=stop), nodes=nodes, tree=rule)


class Trees(Desk):
    """The same with trees."""

    def grow(self, wanted: SpecPlan, accepted: Path = (0, 0, 0, 0)) -> Drafts:
        """``accepted``: how many tokens of the path of first nodes are."""
        for lane, n in enumerate(wanted.nodes):
            assert self.tables.try_grow(lane, len(self.texts[lane]) + n)
        drafts = self.proposer.propose(batch(*self.texts, tables=self.tables), wanted)
        assert drafts.parents is not None
        before, right = [len(text) for text in self.texts], []
        for lane, most in enumerate(accepted):
            path = next((path for path in sorted(nodes_of(drafts, lane), key=len, reverse=True)), ())[:most]
            right.append(len(path))
            self.texts[lane] += [*path, 7]
        self.proposer.advance(target(range(len(SIZES)), before, right))
        return drafts


def nodes_of(drafts: Drafts, i: int) -> dict[Path, float]:
    """Each node, as the tokens on the way to it, and its confidence; in order of the draft."""
    assert drafts.parents is not None
    assert drafts.confidence is not None
    paths: list[Path] = []
    for node in range(int(drafts.lens[i])):
        above = int(drafts.parents[i, node])
        assert above < node
        paths.append((*(paths[above] if above >= 0 else ()), int(drafts.tokens[i, node])))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, drafts.confidence[i].tolist(), strict=False))


class Reference:
    """The drafter's probabilities of what follows a text, from one pass over all of it."""

    def __init__(self, model: Model, text: list[int]) -> None:
        self._model, self._text = model, text
        self._known: dict[Path, np.ndarray] = {}

    def after(self, path: Path) -> np.ndarray:
        if path not in self._known:
            text = [*self._text, *path]
            n = len(text)
            arena = Arena.allocate(2, self._model.kv_shapes(6), torch.float32, torch.device("cpu"))
            rows = ForwardBatch(
                tokens=torch.tensor(text),
                positions=np.arange(n),
                slots=np.arange(n) + 16,
                query_start=np.array([0, n], np.int32),
                context_lens=np.zeros(1, np.int32),
                block_tables=np.arange(1, 6, dtype=np.int32)[None],
            )
            hidden = self._model.forward(rows, arena.layers)
            self._known[path] = self._model.logits(hidden[-1:]).softmax(-1)[0].numpy()
        return self._known[path]

    def choices(self, path: Path, width: int) -> list[tuple[Path, float]]:
        chances = self.after(path)
        order = np.argsort(-chances, kind="stable")[:width]
        return [((*path, int(token)), float(chances[token])) for token in order]

    def best(self, depth: int, nodes: int, width: int) -> dict[Path, float]:
        """EAGLE-2: at each depth the ``width`` likeliest nodes get children; of all, the likeliest are the draft."""
        found: dict[Path, float] = {}
        beam: list[tuple[Path, float]] = [((), 1.0)]
        for _ in range(depth):
            level = {node: above * p for path, above in beam for node, p in self.choices(path, width)}
            found |= level
            beam = sorted(level.items(), key=lambda one: -one[1])[:width]
        return dict(sorted(found.items(), key=lambda one: -one[1])[:nodes])

    def everything(self, depth: int, nodes: int) -> dict[Path, float]:
        """The likeliest of all paths there are: best first."""
        done: dict[Path, float] = {}
        open_: dict[Path, float] = dict(self.choices((), nodes))
        while len(done) < nodes:
            path = max(open_, key=open_.__getitem__)
            done[path] = open_.pop(path)
            if len(path) < depth:
                open_ |= {node: done[path] * p for node, p in self.choices(path, nodes)}
        return done


def references(desk: Trees, model: Model) -> list[Reference]:
    return [Reference(model, list(text)) for text in desk.texts]


@pytest.mark.parametrize("one_call", [True, False], ids=["one call", "pass by pass"])
def test_a_shape_is_filled_with_the_choices_of_its_ranks(model: Model, one_call: bool) -> None:
    desk = Trees(model)
    if not one_call:
        desk.proposer._tree = None
    for depth, nodes in (((3, 3, 2, 1), (10, 7, 7, 2)), ((3, 0, 3, 3), (10, 0, 8, 10))):
        known = references(desk, model)
        drafts = desk.grow(tree_plan(depth, nodes, TreeRule(3, shape=SHAPE)), (2, 0, 1, 1))
        assert drafts.lens.tolist() == list(nodes)
        for i, n in enumerate(nodes):
            expected: dict[Path, tuple[Path, float]] = {(): ((), 1.0)}
            for ranks in SHAPE.paths[:n]:
                above = expected[ranks[:-1]][0]
                expected[ranks] = known[i].choices(above, 3)[ranks[-1]]
            found = nodes_of(drafts, i)
            assert list(found) == [expected[ranks][0] for ranks in SHAPE.paths[:n]]
            np.testing.assert_allclose(
                list(found.values()), [expected[ranks][1] for ranks in SHAPE.paths[:n]], rtol=1e-4
            )


@pytest.mark.parametrize("one_call", [True, False], ids=["one call", "pass by pass"])
def test_the_likeliest_nodes_are_drafted(model: Model, one_call: bool) -> None:
    desk = Trees(model)
    if not one_call:
        desk.proposer._tree = None
    for depth, nodes, width in (((4, 3, 2, 1), (13, 10, 9, 4), 3), ((2, 4, 0, 3), (20, 8, 0, 5), 2)):
        known = references(desk, model)
        drafts = desk.grow(tree_plan(depth, nodes, TreeRule(width)), (3, 1, 0, 1))
        for i in range(len(SIZES)):
            found = nodes_of(drafts, i)
            wanted = known[i].best(depth[i], nodes[i], width) if nodes[i] else {}
            assert list(found) == list(wanted)
            chances = [known[i].after(path[:-1])[path[-1]] for path in found]
            np.testing.assert_allclose(list(found.values()), chances, rtol=1e-4)


def test_no_likelier_path_is_left_out_where_as_many_may_go_on(model: Model) -> None:
    desk = Trees(model)
    known = references(desk, model)
    drafts = desk.grow(tree_plan((2,) * 4, (6,) * 4, TreeRule(6)))
    for i in range(len(SIZES)):
        assert list(nodes_of(drafts, i)) == list(known[i].everything(2, 6))


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize(("depth", "nodes"), [(3, 3), (4, 5), (5, 6), (2, 2), (6, 12)])
def test_few_nodes_may_still_stand_in_a_row(depth: int, nodes: int, width: int) -> None:
    """Where the drafter is all but certain, passes over others do not keep it from reaching its depth."""
    text = batch([3, 4, 5])
    one, chances = np.zeros(1, np.int64), np.array([0.98, *[0.001] * (width - 1)], np.float32)
    growth = grow(text, one, one + depth, one + nodes, TreeRule(width), None)
    who, above = one, one - 1
    for done in range(1, depth + 1):
        choices = np.arange(width)[None].repeat(who.size, 0)
        add_nodes(growth, who, above, choices, chances[None].repeat(who.size, 0))
        who, above = next_parents(growth, done)
    drafts = as_drafts(growth, one, tree_plan((depth,), (nodes,), TreeRule(width)))
    assert drafts.lens.tolist() == [nodes]
    assert list(nodes_of(drafts, 0))[:depth] == [(0,) * n for n in range(1, depth + 1)]
    assert growth.parent_count[0] < nodes


RULES = {
    "shape": (TreeRule(3, shape=SHAPE), None),
    "grown": (TreeRule(3), None),
    "price": (TreeRule(4, (0.0, 0.02, 0.05)), None),
    "survival": (TreeRule(3, (0.0, 0.01, 0.05), later=0.7), SURVIVAL),
    "confidence": (TreeRule(3), StopRule(below=(0.1, 0.2))),
    "chain": (TreeRule(1), None),
}


@pytest.mark.parametrize(("rule", "stop"), RULES.values(), ids=RULES)
def test_one_call_gives_what_single_passes_do(model: Model, rule: TreeRule, stop: StopRule | None) -> None:
    """Drafts, and what the drafter keeps."""
    compiled, single = Trees(model), Trees(model)
    assert compiled.proposer._tree is not None
    single.proposer._tree = None
    steps = [
        ((4, 2, 6, 1), (12, 5, 9, 3), (3, 0, 2, 1)),
        ((0, 5, 1, 3), (0, 10, 4, 7), (0, 2, 1, 0)),
        ((3, 3, 3, 3), (8, 3, 8, 8), (1, 3, 0, 2)),
    ]
    for depth, nodes, accepted in steps:
        whole, parts = (desk.grow(tree_plan(depth, nodes, rule, stop), accepted) for desk in (compiled, single))
        for name in ("tokens", "lens", "parents", "confidence", "signal", "early_exit"):
            mine, other = getattr(whole, name), getattr(parts, name)
            assert (mine is None) == (other is None)
            if mine is not None:
                np.testing.assert_array_equal(mine, other, name)
        assert whole.rows_per_pass == parts.rows_per_pass
        assert whole.kv_redone == parts.kv_redone
        np.testing.assert_array_equal(compiled.proposer._marks.seen, single.proposer._marks.seen)
        assert (whole.lens <= nodes).all()
        for i, most in enumerate(depth):
            assert max(map(len, nodes_of(whole, i)), default=0) <= most
        np.testing.assert_array_equal(whole.early_exit, whole.lens < nodes)
    assert compiled.texts == single.texts
    for mine, other in zip(compiled.arena.layers, single.arena.layers, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])


def test_a_tree_of_width_one_is_the_chain(model: Model) -> None:
    desk, other = Trees(model), Desk(model)
    drafts = desk.grow(tree_plan((4, 3, 2, 5), (4, 3, 2, 5), TreeRule(1)))
    chain = other.step((4, 3, 2, 5), None, (0, 0, 0, 0))
    assert drafts.parents is not None
    np.testing.assert_array_equal(drafts.lens, chain.lens)
    for i, n in enumerate(drafts.lens.tolist()):
        assert drafts.tokens[i, :n].tolist() == chain.tokens[i, :n].tolist()
        assert drafts.parents[i, :n].tolist() == list(range(-1, n - 1))


def test_a_price_ends_drafts_where_nodes_are_worth_less(model: Model) -> None:
    desk = Trees(model)
    known, below = references(desk, model), (0.0, 0.03, 0.06, 0.06)
    drafts = desk.grow(tree_plan((3,) * 4, (12,) * 4, TreeRule(3, below)))
    for i in range(len(SIZES)):
        best = list(known[i].best(3, 12, 3).items())
        end = next((n for n, (_, p) in enumerate(best) if n and p < below[min(n, 3)]), 12)
        assert list(nodes_of(drafts, i)) == [path for path, _ in best[:end]]
    assert set(drafts.lens.tolist()) - {12}


def test_edited_logits_and_those_that_catch_up_are_left_to_single_passes(model: Model) -> None:
    desk, calls = Trees(model, most=16), []
    tree = desk.proposer._tree
    assert tree is not None
    desk.proposer._tree = lambda *args: calls.append(1) or tree(*args)  # type: ignore[func-returns-value]
    wanted = tree_plan((2,) * 4, (5,) * 4, TreeRule(2))
    desk.grow(wanted)  # two lack more than 16 tokens
    assert not calls
    desk.grow(replace(wanted, probe_context=4))
    assert not calls
    desk.grow(tree_plan((2, 2, 0, 2), (5, 5, 0, 5), TreeRule(2)))
    assert calls


def test_a_probe_of_the_latest_tokens_leaves_the_rest_unread(model: Model) -> None:
    """And what is drafted afterwards rests on the whole text."""
    desk = Trees(model)
    probed = desk.grow(replace(tree_plan((3,) * 4, (6,) * 4, TreeRule(2)), probe_context=4))
    assert max(map(len, nodes_of(probed, 0))) == 1
    assert desk.proposer._marks.seen[[0, 2]].tolist() == [0, 0]
    known = references(desk, model)
    drafts = desk.grow(tree_plan((3,) * 4, (6,) * 4, TreeRule(2)))
    for i in range(len(SIZES)):
        assert list(nodes_of(drafts, i)) == list(known[i].best(3, 6, 2))


def test_edited_logits_are_those_that_choices_are_made_of(model: Model) -> None:
    desk = Trees(model)
    ((first, *_),) = [list(nodes_of(desk.grow(tree_plan((2, 0, 0, 0), (6, 0, 0, 0), TreeRule(2))), 0))]
    banned = first[0]
    edited = Trees(model)
    edited.proposer._sampler.add(
        0,
        SamplingParams(temperature=0, logit_bias={banned: -100.0}),
        seed=0,
        n_index=0,
        eos_token_ids=(),
        bad_words=(),
        prompt=(),
    )
    found = nodes_of(edited.grow(tree_plan((2, 0, 0, 0), (6, 0, 0, 0), TreeRule(2))), 0)
    assert len(found) == 6
    assert all(banned not in path for path in found)
