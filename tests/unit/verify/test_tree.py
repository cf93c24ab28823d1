"""Walks through drafted trees, against a plain reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling.draw import draw
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.rng import Purpose
from dynaspec.verify.tree import DraftTrees, accept_tree, walk
from unit.verify.test_chain import GREEDY, UNSEEDED, VOCAB, state_of


def random_trees(rng: np.random.Generator, requests: int, most: int, vocab: int) -> DraftTrees:
    """Any parents before their children; siblings of different tokens, as drafters' choices are."""
    lens = rng.integers(0, most + 1, requests)
    tokens, parents = np.zeros((requests, most), np.int64), np.full((requests, most), -1)
    for b in range(requests):
        taken: dict[int, list[int]] = {}
        for node in range(lens[b]):
            free = [above for above in range(-1, node) if len(taken.get(above, ())) < vocab]
            above = int(rng.choice(free))
            choices = [t for t in range(vocab) if t not in taken.setdefault(above, [])]
            tokens[b, node], parents[b, node] = rng.choice(choices), above
            taken[above].append(int(tokens[b, node]))
    roots = np.concatenate([[0], np.cumsum(lens + 1)[:-1]])
    return DraftTrees(roots, tokens, parents, lens)


def follow(own: list[int], nothing: list[bool], tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """The accepted path of one tree, and its verdict."""
    path: list[int] = []
    verdict = [0] * len(tokens)
    while True:
        at = path[-1] if path else -1
        children = [node for node, above in enumerate(parents) if above == at]
        right = [node for node in children if tokens[node] == own[1 + at] and not nothing[1 + at]]
        for node in children:
            verdict[node] = 1 if node in right else -1
        if not right:
            return path, verdict
        path.append(right[0])


@pytest.mark.parametrize("seed", range(20))
def test_walks_are_those_of_a_plain_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = random_trees(rng, 6, 12, 3)
    rows = int((trees.lens + 1).sum())
    own, nothing = rng.integers(0, 3, rows), rng.random(rows) < 0.1
    accepted, tokens, path, verdict, stop, refused = walk(
        own, nothing, trees.roots, trees.tokens, trees.parents, trees.lens, 12
    )
    for b, (root, n) in enumerate(zip(trees.roots.tolist(), trees.lens.tolist(), strict=True)):
        span = slice(root, root + n + 1)
        drafted, parents = trees.tokens[b, :n].tolist(), trees.parents[b, :n].tolist()
        expected, judged = follow(own[span].tolist(), nothing[span].tolist(), drafted, parents)
        assert accepted[b] == len(expected)
        assert path[b].tolist() == expected + [-1] * (12 - len(expected))
        assert tokens[b, : len(expected)].tolist() == [drafted[node] for node in expected]
        last = expected[-1] if expected else -1
        assert stop[b] == root + 1 + last
        assert tokens[b, len(expected)] == own[stop[b]]
        assert verdict[b].tolist() == judged + [0] * (12 - n)
        children = [node for node in range(n) if parents[node] == last]
        assert refused[b] == (children[0] if children else -1)


def rows_of(trees: DraftTrees) -> Rows:
    """Each root and node with the tokens that lead to it; lane b belongs to request b."""
    lanes, paths = [], []
    for b, n in enumerate(trees.lens.tolist()):
        for node in range(-1, n):
            path: list[int] = []
            while node >= 0:
                path.insert(0, int(trees.tokens[b, node]))
                node = int(trees.parents[b, node])
            lanes.append(b)
            paths.append(path)
    depth = np.array([len(path) for path in paths])
    table = np.zeros((len(paths), max(1, int(depth.max()))), np.int64)
    for row, path in zip(table, paths, strict=True):
        row[: len(path)] = path
    return Rows(np.array(lanes), np.arange(len(lanes)), depth, table)


KINDS = {
    "greedy": [GREEDY] * 5,
    "seeded": [SamplingParams(seed=i, temperature=0.9) for i in range(5)],
    "mixed": [GREEDY, SamplingParams(seed=3), GREEDY, SamplingParams(seed=1, repetition_penalty=1.5), GREEDY],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_what_is_accepted_is_what_rows_give_one_by_one(kind: str, seed: int) -> None:
    """Greedy and seeded requests: the tokens of a row are a function of it and of the text before."""
    rng = np.random.default_rng(seed)
    trees, state = random_trees(rng, 5, 9, 4), state_of(*KINDS[kind])
    rows = rows_of(trees)
    logits = torch.from_numpy(rng.normal(size=(rows.depth.size, VOCAB)).astype(np.float32))
    logits[:, :4] += 2.5  # so that some nodes are accepted
    scores = state.process(logits, rows)
    deepest = rows.drafts.shape[1]
    found = accept_tree(scores, rows, trees, deepest, state)
    own = []
    for row in range(rows.depth.size):  # alone
        one = Rows(rows.lanes[[row]], np.zeros(1, np.int64), rows.depth[[row]], rows.drafts[[row]])
        own.append(int(draw(scores[[row]], one, state, Purpose.TARGET)[0]))
    for b, (root, n) in enumerate(zip(trees.roots.tolist(), trees.lens.tolist(), strict=True)):
        span, parents = slice(root, root + n + 1), trees.parents[b, :n].tolist()
        drafted = trees.tokens[b, :n].tolist()
        path, _ = follow(own[span], [False] * (n + 1), drafted, parents)
        last = path[-1] if path else -1
        emitted = [*(drafted[node] for node in path), own[root + 1 + last]]
        assert found.accepted.accepted[b] == len(path)
        assert found.accepted.tokens[b, : len(emitted)].tolist() == emitted
        assert found.whole[b] == (last not in parents)


def test_a_root_with_every_token_never_refuses_one() -> None:
    """And unseeded requests draw it from the target's scores alone."""
    size = 3000
    trees = DraftTrees(
        np.arange(size) * (VOCAB + 1),
        np.tile(np.arange(VOCAB), (size, 1)),
        np.full((size, VOCAB), -1),
        np.full(size, VOCAB),
    )
    state = state_of(*[UNSEEDED] * size)
    rows = rows_of(trees)
    logits = torch.linspace(0.0, 2.0, VOCAB).expand(rows.depth.size, VOCAB).contiguous()
    found = accept_tree(state.process(logits, rows), rows, trees, 1, state)
    assert (found.accepted.accepted == 1).all()
    assert (found.path[:, 0] == found.accepted.tokens[:, 0]).all()
    seen = np.bincount(found.path[:, 0], minlength=VOCAB) / size
    np.testing.assert_allclose(seen, logits[0].softmax(-1).numpy(), atol=0.035)
