"""Rows of trees in a target pass, against what each node's path says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaspec.contract.proposer import Drafts
from dynaspec.engine.layout import lay_out
from unit.engine.test_layout import BLOCK, step


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root's child to this one."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def trees(rng: np.random.Generator, requests: int, most: int, lens: list[int]) -> Drafts:
    parents = np.array([[rng.integers(-1, node) if node else -1 for node in range(most)] for _ in range(requests)])
    tokens = rng.integers(100, 200, (requests, most))
    return Drafts(tokens=tokens, lens=np.array(lens), parents=parents.astype(np.int64))


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_those_of_every_nodes_path(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lens, lengths = [6, 0, 3], [5, 9, 2]
    drafts = trees(rng, 3, 6, lens)
    assert drafts.parents is not None
    batch = step(lengths, [(3, 2, 3, True)])
    layout = lay_out(batch, drafts, drafts.lens, BLOCK)
    forward, row = layout.forward_batch(torch.device("cpu")), 0
    assert forward.ancestors is not None
    assert layout.trees is not None
    for i, n in enumerate(lens):
        root, parents = row, drafts.parents[i].tolist()
        assert layout.trees.roots[i] == root
        for node in range(-1, n):
            path = path_to(parents, node)
            assert forward.positions[row] == lengths[i] - 1 + len(path)
            if n:
                assert forward.ancestors[row] == 1 + sum(1 << (on + 1) for on in path)
            # KV lies one behind the other, whatever the position.
            place = lengths[i] - 1 + row - root
            assert forward.slots[row] == batch.block_tables[i, place // BLOCK] * BLOCK + place % BLOCK
            wanted = drafts.tokens[i, path].tolist()
            assert forward.tokens[row] == (wanted[-1] if wanted else batch.tokens[i, lengths[i] - 1])
            assert layout.sampled.lanes[row] == i
            assert layout.sampled.depth[row] == len(path)
            assert layout.sampled.drafts[layout.sampled.request[row], : len(path)].tolist() == wanted
            row += 1
    assert layout.decode_rows == row
    assert forward.ancestors[row:].tolist() == [-1] * 3  # the chunk
    assert forward.positions[row:].tolist() == [2, 3, 4]
    assert (layout.sampled_at[-1], layout.sampled.depth[-1]) == (row, 0)  # behind it nobody reads the chunk's


def test_a_cut_tree_is_its_beginning() -> None:
    drafts = trees(np.random.default_rng(0), 1, 6, [6])
    whole = lay_out(step([5], []), drafts, np.array([6]), BLOCK)
    cut = lay_out(step([5], []), drafts, np.array([4]), BLOCK)
    assert cut.ancestors is not None
    assert whole.ancestors is not None
    np.testing.assert_array_equal(cut.ancestors, whole.ancestors[:5])
    np.testing.assert_array_equal(cut.rows.positions, whole.rows.positions[:5])
    np.testing.assert_array_equal(cut.sampled.depth, whole.sampled.depth[:5])


def test_the_largest_tree_fits_in_a_set_of_bits() -> None:
    batch = step([5], [])
    batch.tokens = np.zeros((4, 80), np.int32)
    batch.block_tables = np.arange(80, dtype=np.int32).reshape(4, 20)
    chain = Drafts(np.arange(63)[None], np.array([63]), parents=np.arange(-1, 62)[None])
    layout = lay_out(batch, chain, chain.lens, BLOCK)
    assert layout.ancestors is not None
    seen = layout.ancestors.view(np.uint64)
    assert [int(bits) for bits in seen] == [2 ** (row + 1) - 1 for row in range(64)]
