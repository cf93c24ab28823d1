"""Draft trees, as ``speculative_config`` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import BY_PASSES, METHODS, WITH_TREES
from dynaspec.contract.step import TreeRule
from dynaspec.contract.tree import MAX_NODES, TokenTree

from .words import either, plain

SHAPE_KEY, WIDTH_KEY, NODES_KEY = "speculative_token_tree", "tree_width", "tree_nodes"
KEYS = (SHAPE_KEY, WIDTH_KEY, NODES_KEY)
DEFAULT_WIDTH = 4
"""Of ``auto``, which lets branches grow only where they pay."""
_POLICIES = ("constant", "auto")
_LENGTH = "num_speculative_tokens"


def resolve_trees(values: dict[str, Any]) -> None:
    """Parses the shape, and fills in what follows from it and from the width.

    Args:
        values: canonical keys, the method among them; changed in place.

    Raises:
        ConfigError: no such tree, keys that contradict each other, or a method that drafts chains only.
    """
    if SHAPE_KEY in values:
        _resolve_shape(values)
    given = next((key for key in KEYS if key in values and (key, values[key]) != (WIDTH_KEY, 1)), None)
    if given is not None and values["method"] in METHODS and values["method"] not in WITH_TREES:
        raise ConfigError(
            f"{given} is {plain(values[given])!r} but method is {values['method']!r}, which drafts chains; expected no "
            f"{given}, or method {either(WITH_TREES)}"
        )
    if given is not None and values["method"] == "suffix":
        if given == SHAPE_KEY:
            raise ConfigError(
                f"{SHAPE_KEY} is {plain(values[given])!r} but method is 'suffix', whose nodes are those of the largest "
                f"counts; expected {WIDTH_KEY} and {NODES_KEY} instead"
            )
        values.setdefault("policy", "constant")
    if given is not None and values.get("use_heterogeneous_vocab"):
        raise ConfigError(
            f"{given} is {plain(values[given])!r} beside use_heterogeneous_vocab, whose drafts are chains; expected "
            "one of the two"
        )
    if NODES_KEY in values and values.get(WIDTH_KEY, 1) == 1:
        raise ConfigError(f"{NODES_KEY} is {values[NODES_KEY]!r} but there is no {WIDTH_KEY} above 1; expected one")


def _resolve_shape(values: dict[str, Any]) -> None:
    for key in (WIDTH_KEY, NODES_KEY):
        if key in values:
            raise ConfigError(f"{key} is {values[key]!r} beside a {SHAPE_KEY}; expected one of the two")
    tree = TokenTree.parse(values[SHAPE_KEY])
    length = values.get(_LENGTH, tree.depth)
    if length not in (tree.depth, len(tree.parents)):
        raise ConfigError(
            f"{_LENGTH} is {length!r} but {SHAPE_KEY} has {len(tree.parents)} nodes and depth {tree.depth}; expected "
            f"either of these, or no {_LENGTH}"
        )
    values[SHAPE_KEY], values[_LENGTH] = tree.paths, tree.depth
    values.setdefault("policy", "constant")


def check_policy(values: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: trees with a policy that plans lengths only.
    """
    policy = values["policy"]
    # ``auto`` prices what is looked up as chains.
    allowed = ("constant",) if SHAPE_KEY in values or values["method"] not in BY_PASSES else _POLICIES
    given = next((key for key in KEYS if key in values and (key, values[key]) != (WIDTH_KEY, 1)), None)
    if given is not None and policy not in allowed:
        raise ConfigError(
            f"{given} is {plain(values[given])!r} but policy is {policy!r}; expected no {given}, or policy "
            f"{either(allowed)}"
        )
    for other in ("draft_confidence_threshold", "kv_write_gating_threshold"):
        if given is not None and values.get(other):
            raise ConfigError(f"{given} is {plain(values[given])!r} beside a {other}; expected one of the two")


def rule_of(shape: TokenTree | None, width: int | None) -> TreeRule | None:
    """How drafts of a constant size branch; None = they are chains."""
    if shape is not None:
        return TreeRule(shape.width, shape=shape)
    return TreeRule(width) if width is not None and width > 1 else None


def nodes_of(shape: int | None, width: int | None, nodes: int | None, depth: int) -> int:
    """Most nodes of a draft; ``shape``: those of a fixed one."""
    return shape or nodes or min(MAX_NODES, (width or DEFAULT_WIDTH) * depth)
