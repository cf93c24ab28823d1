"""A whole draft on CPU in one compiled call, chains or trees: reading what the drafter lacks, all passes, and the rule
that ends them.

Between two passes of a small drafter the host would take as long as a pass: its code and data are not in the caches,
which hold what the passes have left there.

The drafter is a model, or a head on hidden states of any kind (``model.decoder_heads``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import copy_row, kernel, rows_at
from dynaspec.contract.proposer import Ints
from dynaspec.kv.blocks import Arena
from dynaspec.kv.rows import fill_rows
from dynaspec.model.batch import NO_KV_ONLY
from dynaspec.model.compiled import NO_TAPS, Addresses, CacheAddresses, CompiledDecoder
from dynaspec.model.kernels.decode import PassRows, decode, logits
from dynaspec.model.kernels.decoder_heads import CompiledHead, fuse, head_logits, head_pass

from .drawing import Choices, take_first
from .growth import Growth, add_best, largest, next_parents, parent_rows
from .own_vocabulary import SharedVocabulary
from .warm_up import no_growth, nobody
from .watermark import all_but_last, columns_of, slots_before, unread_rows

Int32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


Chain = Callable[..., tuple[Ints, Ints, Ints]]
"""A whole draft in one call: of (texts, lengths, tables, block_size, read, most, choices), as ``draft_chain``."""
Tree = Callable[..., tuple[Ints, Ints]]
"""Likewise trees: of (tables, block_size, read, most, lengths, requests, known, growth), as ``draft_tree``."""


class Known(NamedTuple):
    """Tokens that a drafter with a vocabulary of its own shares with its target; both empty = it has the target's."""

    own: Ints = np.empty(0, np.int64)
    """[S] its ids of the tokens that are drafted."""
    own_of: Ints = np.empty(0, np.int64)
    """[the target's vocabulary] its ids; of tokens that it does not have, any."""


def chain_of(
    model: CompiledDecoder,
    arena: Arena,
    head: CompiledHead | None = None,
    states: Floats = NO_TAPS.arena,
    shared: SharedVocabulary | None = None,
) -> Chain:
    """Drafts on KV in ``arena``. They are compiled, or loaded, here: else the first one would take seconds.

    Args:
        head: None = the model drafts; else this head, which it is the decoder of, from ``states``.
        states: [KV slots, …] the target's, see ``taps.Taps.arena``.
        shared: the tokens to draft of a model with a vocabulary of its own.
    """
    known = Known() if shared is None else Known(shared.own, np.maximum(shared.own_of, 0))
    addresses, blocks = CacheAddresses(), len(arena.layers[0][0])

    def chain(
        texts: Int32, lengths: Ints, tables: Int32, block_size: int, read: Ints, most: int, choices: Choices
    ) -> tuple[Ints, Ints, Ints]:
        caches = addresses.of(arena.layers)
        return draft_chain(
            model, head, states, known, caches, blocks, texts, lengths, tables, block_size, read, most, choices
        )

    chain(*nobody())
    return chain


def tree_of(
    model: CompiledDecoder, arena: Arena, head: CompiledHead | None = None, states: Floats = NO_TAPS.arena
) -> Tree:
    """The same for trees."""
    addresses, blocks = CacheAddresses(), len(arena.layers[0][0])

    def tree(
        tables: Int32,
        block_size: int,
        read: Ints,
        most: int,
        lengths: Ints,
        requests: Ints,
        known: Ints,
        growth: Growth,
    ) -> tuple[Ints, Ints]:
        caches = addresses.of(arena.layers)
        where = caches, blocks, tables, block_size, read, most
        return draft_tree(model, head, states, *where, lengths, requests, known, growth)

    tree(*no_growth())
    return tree


@kernel
def _read(
    model: CompiledDecoder,
    head: CompiledHead | None,
    states: Floats,
    caches: Addresses,
    blocks: int,
    tables: Int32,
    block_size: int,
    unread: tuple[Ints, Int32, Ints, Ints, tuple[Int32, Ints, Ints, Ints, Int32]],
) -> tuple[Floats, int]:
    """A pass over what ``unread_rows`` gave: what is left after each request's last token [A, hidden]; its rows."""
    _, context, _, tokens, (query_start, row_lanes, positions, slots, block_tables) = unread
    no_taps, nowhere = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    rows = PassRows(tokens, query_start, context, block_tables, slots, positions, nowhere, all_but_last(query_start))
    if head is None:
        return decode(model, no_taps, nowhere, caches, blocks, rows), slots.size
    before = rows_at(states, slots_before(tables, block_size, row_lanes, positions))
    return head_pass(head, caches, blocks, rows, fuse(head, before)), slots.size


@kernel
def draft_tree(
    model: CompiledDecoder,
    head: CompiledHead | None,
    states: Floats,
    caches: Addresses,
    blocks: int,
    tables: Int32,
    block_size: int,
    read: Ints,
    most: int,
    lengths: Ints,
    requests: Ints,
    known: Ints,
    growth: Growth,
) -> tuple[Ints, Ints]:
    """Grows the trees of ``requests`` [A], places among B, of which none lacks more than it may read at once.

    Args:
        model … most: see ``draft_chain``.
        lengths: [B]
        known: [V] the target's ids of the tokens that logits are about; empty = all, in their order.
        growth: trees without nodes.

    Returns:
        Rows of each pass; committed tokens that the drafter has read of each request [A].
    """
    lanes = np.zeros(lengths.size, np.int64)
    for a in range(requests.size):
        lanes[requests[a]] = growth.lanes[a]
    unread = unread_rows(growth.texts, tables, block_size, lanes, lengths, read, requests, most)
    hidden, size = _read(model, head, states, caches, blocks, tables, block_size, unread)
    no_taps, nowhere = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    longest = largest(growth.depth)
    rows_per_pass, kept = np.empty(longest + 1, np.int64), np.empty((0, 0, 0), np.float32)
    rows_per_pass[0] = size
    if head is not None:  # what passes were left with after the root and each parent
        kept = np.empty((requests.size, 1 + growth.parents.shape[1], hidden.shape[1]), np.float32)
        for a in range(requests.size):
            copy_row(hidden[a], kept[a, 0])
    who, above = np.arange(requests.size), np.full(requests.size, -1, np.int64)
    for done in range(1, longest + 1):
        scores = logits(model, hidden) if head is None else head_logits(head, hidden)
        add_best(growth, who, above, scores, known)
        who, above = next_parents(growth, done)
        if not who.size:
            return rows_per_pass[:done], unread[2]
        places, fields, row_tokens, ancestors, owners, nodes, fresh = parent_rows(
            growth, who, above, tables, block_size
        )
        query_start, _, positions, slots, block_tables = fields
        context = growth.lengths[places].astype(np.int32)
        rows = PassRows(row_tokens, query_start, context, block_tables, slots, positions, ancestors, NO_KV_ONLY)
        if head is None:
            every = decode(model, no_taps, nowhere, caches, blocks, rows)
        else:
            before = np.empty((positions.size, hidden.shape[1]), np.float32)
            for row in range(positions.size):
                node = growth.above[owners[row], nodes[row]]
                copy_row(kept[owners[row], 0 if node < 0 else 1 + growth.row[owners[row], node]], before[row])
            every = head_pass(head, caches, blocks, rows, before)
        hidden = rows_at(every, fresh)
        if head is not None:
            for n in range(who.size):
                copy_row(hidden[n], kept[who[n], 1 + growth.row[who[n], above[n]]])
        rows_per_pass[done] = positions.size
    return rows_per_pass[: longest + 1], unread[2]


@kernel
def draft_chain(
    model: CompiledDecoder,
    head: CompiledHead | None,
    states: Floats,
    known: Known,
    caches: Addresses,
    blocks: int,
    texts: Int32,
    lengths: Ints,
    tables: Int32,
    block_size: int,
    read: Ints,
    most: int,
    choices: Choices,
) -> tuple[Ints, Ints, Ints]:
    """Drafts for ``Choices.requests`` [A], of which none lacks more than it may read at once.

    Args:
        model, head, states: see ``chain_of``. numba compiles no branch for a head where there is none.
        caches: see ``model.compiled.CacheAddresses``; of so many ``blocks``.
        texts, lengths: [B] as the drafter reads them; those in ``choices`` are the target's.
        tables, block_size, read, most: see ``unread_rows``.

    Returns:
        Rows of each pass; committed tokens that the drafter has read of each request [A]; draft tokens processed of
        each [A].
    """
    unread = unread_rows(texts, tables, block_size, choices.lanes, lengths, read, choices.requests, most)
    lanes, end = unread[0], unread[2]
    no_taps, nowhere = np.empty((0, 0), np.float32), np.empty(0, np.int64)
    hidden, size = _read(model, head, states, caches, blocks, tables, block_size, unread)
    running, processed, longest = np.arange(lanes.size), np.zeros_like(lanes), choices.tokens.shape[1]
    rows_per_pass = np.empty(longest + 1, np.int64)
    rows_per_pass[0] = size
    for done in range(1, longest + 1):
        scores = logits(model, hidden) if head is None else head_logits(head, hidden)
        if known.own.size:
            scores = columns_of(scores, known.own)
        ran, running = running, take_first(scores, running, done, choices)
        if not running.size:
            return rows_per_pass[:done], end, processed
        places = choices.requests[running]
        start, tokens = lengths[places] + (done - 1), np.empty(running.size, np.int64)
        for i in range(running.size):
            token = choices.tokens[places[i], done - 1]
            tokens[i] = known.own_of[token] if known.own_of.size else token
        query_start, _, positions, slots, block_tables = fill_rows(
            tables, block_size, lanes[running], start, np.ones_like(start)
        )
        rows = PassRows(
            tokens, query_start, start.astype(np.int32), block_tables, slots, positions, nowhere, NO_KV_ONLY
        )
        if head is None:
            hidden = decode(model, no_taps, nowhere, caches, blocks, rows)
        else:
            hidden = head_pass(head, caches, blocks, rows, rows_at(hidden, np.searchsorted(ran, running)))
        processed[running] = done
        rows_per_pass[done] = running.size
    return rows_per_pass, end, processed
