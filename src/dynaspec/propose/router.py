"""Several proposers side by side: each request of a step is drafted for by the one that its plan names.

All of them follow every request, so that any may be chosen in the next step. Each stands behind a guard of its own:
the faults of one do not touch the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints, KeepsText, KeptText, NewText, Offers, TargetStep
from dynaspec.contract.step import SpecPlan

from .guard import FaultBarrier, no_drafts

Floats = npt.NDArray[np.float32]


class Router:
    """The proposers of an engine, in the order of ``Limits.proposers``."""

    def __init__(self, proposers: Sequence[FaultBarrier]) -> None:
        self._proposers = tuple(proposers)
        self._readers = [guard for guard in proposers if guard.proposer.needs.text]

    @property
    def enabled(self) -> dict[str, bool]:
        """Each proposer's name, and whether its guard still lets it draft."""
        return {guard.proposer.traits.name: guard.enabled for guard in self._proposers}

    def kept(self) -> KeptText | None:
        """What a proposer keeps of answers; None if none does."""
        keepers = (guard.proposer for guard in self._readers)
        return next((keeper.kept() for keeper in keepers if isinstance(keeper, KeepsText)), None)

    def lag(self, batch: DecodeBatch) -> tuple[tuple[int, ...], ...]:
        """A column for each proposer: see ``Proposer.lag``."""
        return tuple(proposer.lag(batch) for proposer in self._proposers)

    def peek(self, batch: DecodeBatch) -> tuple[Offers | None, ...]:
        """Of each proposer: see ``Proposer.peek``."""
        return tuple(proposer.peek(batch) for proposer in self._proposers)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        """Drafts of all requests, each from the proposer that the plan names for it."""
        if not any(plan.depth):
            return no_drafts(len(plan.depth))
        if len(self._proposers) == 1:
            return self._proposers[0].propose(batch, plan)
        members: dict[int, list[int]] = {}
        for i, (proposer, depth) in enumerate(zip(plan.proposer, plan.depth, strict=True)):
            if depth:
                members.setdefault(proposer, []).append(i)
        if len(members) == 1:  # the others have depth 0, which any proposer leaves alone
            return self._proposers[next(iter(members))].propose(batch, plan)
        parts = [
            (keep, self._proposers[proposer].propose(Part.of(batch, keep), plan.select(keep)))
            for proposer, keep in sorted(members.items())
        ]
        return merge(len(plan.depth), parts)

    def advance(self, step: TargetStep) -> None:
        for proposer in self._proposers:
            proposer.advance(step)

    @property
    def needs_text(self) -> bool:
        """Whether ``commit`` has anybody to tell."""
        return bool(self._readers)

    def commit(self, text: NewText) -> None:
        for proposer in self._readers:
            proposer.commit(text)

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        for proposer in self._proposers:
            proposer.admit(lane, cached_blocks, cache_salt)

    def evict(self, lane: int) -> None:
        for proposer in self._proposers:
            proposer.evict(lane)


@dataclass(slots=True)
class Part:
    """Some of a batch's requests. Satisfies ``contract.proposer.DecodeBatch``."""

    ids: Sequence[str]
    lanes: Ints
    lengths: Ints
    tokens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]

    @classmethod
    def of(cls, batch: DecodeBatch, keep: Sequence[int]) -> Part:
        ids = batch.ids
        return cls(
            tuple(ids[i] for i in keep), batch.lanes[keep], batch.lengths[keep], batch.tokens, batch.block_tables
        )


def merge(requests: int, parts: Sequence[tuple[Sequence[int], Drafts]]) -> Drafts:
    """One step's drafts out of several proposers'.

    Tokens without a signal that others have get NaN. Certain drafts beside drawn ones get q = one-hot, which is what
    acceptance takes certain drafts to be. Chains beside trees become trees without branches.

    Args:
        requests: B, the requests of the whole step; those in no part have length 0.
        parts: the places [b] of a proposer's requests in the step, ascending, and their drafts.
    """
    merged = no_drafts(requests)
    width = max((drafts.tokens.shape[1] for _, drafts in parts), default=0)
    merged.tokens = np.zeros((requests, width), dtype=np.int64)
    merged.early_exit = early_exit = np.zeros(requests, dtype=np.bool_)
    skipped: dict[str, str] = {}
    for keep, drafts in parts:
        merged.tokens[keep, : drafts.tokens.shape[1]] = drafts.tokens
        merged.lens[keep] = drafts.lens
        if drafts.early_exit is not None:
            early_exit[keep] = drafts.early_exit
        merged.rows_per_pass += drafts.rows_per_pass
        merged.kv_skipped += drafts.kv_skipped
        merged.kv_redone += drafts.kv_redone
        skipped |= drafts.skipped or {}
    merged.skipped = skipped
    merged.confidence = _column(merged.tokens.shape, [(keep, drafts.confidence) for keep, drafts in parts])
    merged.signal = _column(merged.tokens.shape, [(keep, drafts.signal) for keep, drafts in parts])
    merged.repeat_bonus = _column(merged.tokens.shape, [(keep, drafts.repeat_bonus) for keep, drafts in parts])
    merged.q = _distributions(merged.tokens.shape, parts)
    if any(drafts.parents is not None for _, drafts in parts):
        merged.parents = np.tile(np.arange(-1, width - 1), (requests, 1))
        for keep, drafts in parts:
            if drafts.parents is not None:
                merged.parents[keep, : drafts.parents.shape[1]] = drafts.parents
    return merged


def _column(shape: tuple[int, ...], parts: Sequence[tuple[Sequence[int], Floats | None]]) -> Floats | None:
    if all(values is None for _, values in parts):
        return None
    column = np.full(shape, np.nan, dtype=np.float32)
    for keep, values in parts:
        if values is not None:
            column[keep, : values.shape[1]] = values
    return column


def _distributions(shape: tuple[int, ...], parts: Sequence[tuple[Sequence[int], Drafts]]) -> torch.Tensor | None:
    like = next((drafts.q for _, drafts in parts if drafts.q is not None), None)
    if like is None:
        return None
    q = like.new_zeros(*shape, like.shape[2])
    for keep, drafts in parts:
        if drafts.q is not None:
            q[torch.tensor(keep, device=q.device), : drafts.q.shape[1]] = drafts.q
        else:
            request, slot = np.nonzero(np.arange(drafts.tokens.shape[1]) < drafts.lens[:, None])
            at = np.asarray(keep)[request], slot, drafts.tokens[request, slot]
            q[tuple(torch.from_numpy(column).to(q.device) for column in at)] = 1.0
    return q
