"""Trees of a fixed shape: what may be written, and what it means."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.tree import MAX_NODES, MAX_WIDTH, TokenTree

VLLMS = "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 1), (1,), (1, 0)]"


def test_nodes_stand_in_order_of_depth() -> None:
    tree = TokenTree.parse([(0, 0), (1,), (0,), (0, 1), (0, 1, 0), (1, 0)])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
    assert tree.parents == (-1, -1, 0, 0, 1, 3)
    assert tree.ranks == (0, 1, 0, 1, 0, 0)
    assert tree.depths == (1, 1, 2, 2, 2, 3)
    assert (tree.depth, tree.width) == (3, 2)


def test_text_lists_and_tuples_say_the_same() -> None:
    from_text = TokenTree.parse(VLLMS)
    assert from_text.depth == 4
    assert from_text == TokenTree.parse([list(path) for path in from_text.paths])
    assert from_text == TokenTree.parse(tuple(reversed(from_text.paths)) * 2)


def grown(seed: int) -> list[tuple[int, ...]]:
    """A random tree, shuffled: each node is the next child of one that is there."""
    rng = np.random.default_rng(seed)
    nodes: list[tuple[int, ...]] = [()]
    for _ in range(int(rng.integers(1, MAX_NODES + 1))):
        above = nodes[int(rng.integers(len(nodes)))]
        children = sum(len(node) == len(above) + 1 and node[:-1] == above for node in nodes)
        if children < MAX_WIDTH:
            nodes.append((*above, children))
    found = nodes[1:]
    return [found[i] for i in rng.permutation(len(found))]


@given(st.integers(0, 2**32).map(grown))
def test_any_tree(paths: list[tuple[int, ...]]) -> None:
    tree = TokenTree.parse(paths)
    assert set(tree.paths) == set(paths)
    assert len(tree.paths) == len(paths)
    for i, (path, parent, rank, depth) in enumerate(
        zip(tree.paths, tree.parents, tree.ranks, tree.depths, strict=True)
    ):
        assert parent < i
        assert path == (*(tree.paths[parent] if parent >= 0 else ()), rank)
        assert depth == len(path)
    assert all(a <= b for a, b in pairwise(tree.depths))
    assert TokenTree.parse(str(list(paths))) == tree


@pytest.mark.parametrize(
    "value",
    [
        *([], "", "[]", "no list", "[(0,), (0, 0)", "__import__('os')", "0", 0, None, {}, {(0,)}, [()], [(0,), ()]),
        *([0, 1], ["0"], [(0.0,)], [(True,)], [(-1,)], [(MAX_WIDTH,)], ["01"], "[" * 400),
    ],
    ids=str,
)
def test_what_is_no_list_of_paths_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="expected a list of paths such as") as caught:
        TokenTree.parse(value)
    assert str(caught.value).startswith(f"speculative_token_tree is {value!r}; ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("paths", "path", "missing"),
    [
        ([(0,), (1, 0)], (1, 0), (1,)),
        ([(0, 0)], (0, 0), (0,)),
        ([(1,)], (1,), (0,)),
        ([(0,), (0, 0), (0, 2)], (0, 2), (0, 1)),
    ],
)
def test_a_path_without_its_beginning_or_likelier_siblings(
    paths: list[tuple[int, ...]], path: tuple[int, ...], missing: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenTree.parse(paths)
    assert str(caught.value) == (
        f"speculative_token_tree has the path {path} but not {missing}; expected the beginning of every path, and "
        "likelier choices before others"
    )


def test_the_bounds() -> None:
    chain = [(0,) * n for n in range(1, MAX_NODES + 1)]
    assert TokenTree.parse(chain).depth == MAX_NODES
    assert TokenTree.parse([(rank,) for rank in range(MAX_WIDTH)]).width == MAX_WIDTH
    with pytest.raises(ConfigError, match=f"has {MAX_NODES + 1} nodes; expected at most {MAX_NODES}"):
        TokenTree.parse([*chain, (0,) * (MAX_NODES + 1)])
