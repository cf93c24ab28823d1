"""Draft trees of a fixed shape, as ``speculative_token_tree`` says it (vLLM's spelling)."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ConfigError

MAX_NODES = 63
"""Nodes of a tree; with its root they are the rows that a set of 64 bits can tell apart."""
MAX_WIDTH = 16
"""Children of a node."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Nodes in order of depth, so that each comes after its parent, and after its siblings of lower rank."""

    paths: tuple[tuple[int, ...], ...]
    """Of each node: the ranks on the way to it."""
    parents: tuple[int, ...]
    """Of each node; −1: it follows the last committed token."""
    ranks: tuple[int, ...]
    """Which of the drafter's choices each is: 0 = the most probable one."""
    depths: tuple[int, ...]
    """Of each node, from 1."""

    @classmethod
    def parse(cls, value: object) -> TokenTree:
        """The tree of a list of paths, each a tuple of ranks, or of the same as text: ``[(0,), (0, 0), (1,)]``.

        Raises:
            ConfigError: no such list, or a path whose beginning is missing.
        """
        paths = _paths(value)
        place = {path: i for i, path in enumerate(paths)}
        for path in paths:
            for missing in (path[:-1], *((*path[:-1], rank) for rank in range(path[-1]))):
                if missing and missing not in place:
                    raise ConfigError(
                        f"speculative_token_tree has the path {path} but not {missing}; expected the beginning of "
                        "every path, and likelier choices before others"
                    )
        parents = tuple(place[path[:-1]] if len(path) > 1 else -1 for path in paths)
        return cls(tuple(paths), parents, tuple(path[-1] for path in paths), tuple(map(len, paths)))

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return self.depths[-1]

    @property
    def width(self) -> int:
        """Most children of a node."""
        return max(self.ranks) + 1


def _paths(value: object) -> list[tuple[int, ...]]:
    """The paths in order of depth, then of rank."""
    given = value
    if isinstance(value, str):
        try:
            given = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            given = None
    if not isinstance(given, Sequence) or isinstance(given, str) or not given or not all(map(_is_path, given)):
        raise ConfigError(
            f"speculative_token_tree is {value!r}; expected a list of paths such as [(0,), (0, 0), (1,)], each a tuple "
            f"of ranks from 0 to {MAX_WIDTH - 1}"
        )
    paths = sorted({tuple(path) for path in given}, key=lambda path: (len(path), path))
    if len(paths) > MAX_NODES:
        raise ConfigError(f"speculative_token_tree has {len(paths)} nodes; expected at most {MAX_NODES}")
    return paths


def _is_path(path: object) -> bool:
    return (
        isinstance(path, Sequence)
        and not isinstance(path, str)
        and len(path) > 0
        and all(type(rank) is int and 0 <= rank < MAX_WIDTH for rank in path)
    )
