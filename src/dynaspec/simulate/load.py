"""What a step makes the hardware do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.step import ProposerTraits, Work

from .traces import Ints


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step's work as cost models price it; what ``Work`` says, and how it is spread over requests."""

    work: Work
    requests: int
    """Decoding requests."""
    context: int
    """Σ over the requests of the target pass, prefilling ones too, of the KV entries that each reads once."""
    drafting: tuple[int, ...] = ()
    """Requests that get a token from each drafter pass."""
    draft_context: tuple[int, ...] = ()
    """Σ over the requests of each drafter pass of the drafter's KV entries that it reads."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one request that are computed in a step."""

    start: int
    count: int


def step_load(
    traits: ProposerTraits,
    context: Ints,
    drafted: Ints,
    verified: Ints,
    ingested: Ints,
    chunks: Sequence[Chunk] = (),
) -> StepLoad:
    """
    Args:
        context: [B] committed tokens of the decoding requests.
        drafted: [B] tokens drafted.
        verified: [B] tokens of them that the target tests.
        ingested: [B] committed tokens that the drafter's first pass takes in; 0 where it does not run.
    """
    rows_per_pass, drafting, draft_context = _drafter_passes(traits, context, drafted, ingested)
    # Row j of a request (0-based) attends to context + j entries.
    decode_kv = int(((verified + 1) * context).sum() + (verified * (verified + 1) // 2).sum())
    chunk_kv = sum(c.count * c.start + c.count * (c.count + 1) // 2 for c in chunks)
    work = Work(
        rows_per_pass=rows_per_pass,
        verify_rows=int(verified.sum()) + len(context),
        kv_tokens=decode_kv + chunk_kv,
        prefill_rows=sum(c.count for c in chunks),
    )
    return StepLoad(
        work=work,
        requests=len(context),
        context=int((context + verified).sum()) + sum(c.start + c.count for c in chunks),
        drafting=drafting,
        draft_context=draft_context,
    )


def _drafter_passes(
    traits: ProposerTraits, context: Ints, drafted: Ints, ingested: Ints
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Rows, requests that get a token and KV entries read, for each pass."""
    if traits.passes_per_draft == "none":
        return (), (), ()
    starting = ingested > 0
    if not starting.any():
        return (), (), ()
    first_rows = int(ingested.sum())
    first_context = int(context[starting].sum())
    if traits.passes_per_draft == "one":
        return (first_rows,), (int((drafted > 0).sum()),), (first_context,)
    # alive[j]: requests with more than j drafted tokens, and the sum of their contexts.
    count = np.bincount(drafted)
    alive = count[::-1].cumsum()[::-1][1:]
    read = np.bincount(drafted, weights=context)[::-1].cumsum()[::-1][1:].astype(np.int64)
    later_rows, later_context = alive[1:], read[1:] + alive[1:] * np.arange(1, max(len(alive), 1))
    drafting = tuple(alive.tolist()) if len(alive) else (0,)
    return (
        (first_rows, *later_rows.tolist()),
        drafting,
        (first_context, *later_context.tolist()),
    )
