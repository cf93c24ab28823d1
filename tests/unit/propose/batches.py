"""Batches for proposers, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.proposer import Ints, Offers
from dynaspec.contract.step import SpecPlan, StopRule
from dynaspec.kv.blocks import BlockPool, BlockTables

BLOCK = 16


@dataclass
class Batch:
    """Satisfies ``contract.proposer.DecodeBatch``."""

    ids: Sequence[str]
    lanes: Ints
    lengths: Ints
    tokens: np.ndarray
    block_tables: np.ndarray


@dataclass
class Target:
    """Satisfies ``contract.proposer.TargetStep``."""

    lanes: Ints
    lengths: Ints
    accepted: Ints


def batch(*texts: Sequence[int], tables: BlockTables | None = None, lanes: Sequence[int] | None = None) -> Batch:
    """One request a text, on lanes 0, 1, … unless told otherwise; ids are a, b, …"""
    places = list(range(len(texts))) if lanes is None else list(lanes)
    tokens = np.full((max(places, default=0) + 1, 300), 31, dtype=np.int32)
    for lane, text in zip(places, texts, strict=True):
        tokens[lane, : len(text)] = text
    return Batch(
        ids=tuple("abcdefgh"[: len(texts)]),
        lanes=np.array(places, dtype=np.int64),
        lengths=np.array([len(text) for text in texts], dtype=np.int64),
        tokens=tokens,
        block_tables=np.zeros((1, 1), dtype=np.int32) if tables is None else tables.array,
    )


def offered(found: tuple[tuple[int, int], ...]) -> Offers:
    """Tokens 0, as many as are said to be found."""
    table = np.array(found, dtype=np.int64).reshape(-1, 2)
    return Offers(table, np.zeros((len(found), table[:, 1].max(initial=0)), dtype=np.int64))


def plan(
    *depth: int,
    stop: StopRule | None = None,
    gate: float = 0.0,
    probe_context: int = 0,
    proposer: Sequence[int] | None = None,
) -> SpecPlan:
    owners = (0,) * len(depth) if proposer is None else tuple(proposer)
    return SpecPlan(1, depth, owners, depth, stop, gate_kv_below=gate, probe_context=probe_context)


def block_tables(num_blocks: int = 40, lanes: int = 4, size: int = BLOCK) -> BlockTables:
    return BlockTables(BlockPool(num_blocks), lanes, 256, size, caching=True)


def target(lanes: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]) -> Target:
    lanes_, lengths_, accepted_ = (np.array(column, dtype=np.int64) for column in (lanes, lengths, accepted))
    return Target(lanes_, lengths_, accepted_)
