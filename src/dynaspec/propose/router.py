"""Several proposers side by side: each request of a step is drafted for by the one that its plan names. And what they
offered and drafted, as columns of the seam.

All of them follow every request, so that any may be chosen in the next step. Each stands behind a guard of its own:
the faults of one do not touch the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import DecodeBatch, Drafts, Ints, KeepsText, KeptText, NewText, Offers, TargetStep
from dynaspec.contract.step import DraftView, SpecPlan

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


def view_columns(offers: Sequence[Offers | None]) -> tuple[tuple[tuple[int, int], ...] | None, ...]:
    """``StepView.offers``.

    Args:
        offers: of each proposer.
    """
    return tuple([None if one is None else tuple(map(tuple, one.found.tolist())) for one in offers])


@kernel
def _compare(found: Ints, tokens: Ints, texts: npt.NDArray[np.int32], lanes: Ints, starts: Ints, ends: Ints) -> Ints:
    """[B, 3] Match length, tokens on offer that a text has got to, and how many of them, from the first on, are the
    text's.

    Args:
        found: [B, 2] match length, and tokens on offer.
        tokens: [B, ≥ most on offer]
        texts: [lanes, ≥ end]
        lanes, starts, ends: [B] of the text that has come since the offer.
    """
    out = np.zeros((len(found), 3), np.int64)
    for r in range(len(found)):
        compared, right = max(0, min(found[r, 1], ends[r] - starts[r])), 0
        while right < compared and tokens[r, right] == texts[lanes[r], starts[r] + right]:
            right += 1
        out[r, 0], out[r, 1], out[r, 2] = found[r, 0], compared, right
    return out


def came_true(
    offers: Sequence[Offers | None], texts: npt.NDArray[np.int32], lanes: Ints, starts: Ints, ends: Ints
) -> tuple[tuple[tuple[int, int, int], ...] | None, ...]:
    """``StepOutcome.came_true``: what comes of offers, in steps that draft none of them too.

    Args:
        offers: of each proposer, as it was asked when the texts ended at ``starts``.
        texts, lanes, starts, ends: see ``_compare``.
    """
    columns: list[tuple[tuple[int, int, int], ...] | None] = []
    for one in offers:
        if one is None:
            columns.append(None)
            continue
        if not one.found.any():
            columns.append(((0, 0, 0),) * len(one.found))
            continue
        columns.append(tuple(map(tuple, _compare(one.found, one.tokens, texts, lanes, starts, ends).tolist())))
    return tuple(columns) if columns.count(None) < len(columns) else ()


def draft_view(drafts: Drafts) -> DraftView:
    """What was drafted; requests whose proposer lacks a signal (None or NaN) have none in the view."""
    lens = tuple(drafts.lens.tolist())
    return DraftView(
        length=lens,
        confidence=((),) * len(lens) if drafts.confidence is None else _cut(drafts.confidence, lens),
        signal=() if drafts.signal is None else _cut(drafts.signal, lens),
        repeat_bonus=() if drafts.repeat_bonus is None else _cut(drafts.repeat_bonus, lens),
        parents=None if drafts.parents is None else _first(drafts.parents, lens),
    )


def _first(column: npt.NDArray[np.int64], lens: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(row[:n]) for row, n in zip(column.tolist(), lens, strict=True)])


def _cut(column: npt.NDArray[np.float32], lens: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    """Rows without their padding; empty ones for NaN."""
    rows = zip(column[:, : max(lens, default=0)].tolist(), lens, strict=True)
    return tuple([() if n == 0 or math.isnan(row[0]) else tuple(row[:n]) for row, n in rows])
