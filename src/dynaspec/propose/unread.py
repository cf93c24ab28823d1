"""What a drafter lacks of its requests, as rows of its first pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Ints
from dynaspec.kv.rows import fill_rows, tokens_at

Int32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@kernel
def unread_rows(
    texts: Int32,
    tables: Int32,
    block_size: int,
    lanes: Ints,
    lengths: Ints,
    read: Ints,
    requests: Ints,
    most: int,
) -> tuple[Ints, Int32, Ints, Ints, tuple[Int32, Ints, Ints, Ints, Int32]]:
    """Rows of the committed tokens that a drafter lacks.

    Args:
        texts: [lanes, max length] tokens of all lanes; tables: [lanes, max blocks] of all lanes.
        lanes, lengths: [B]
        read: [B] tokens after which each request is read on.
        requests: [A] places in the batch.
        most: rows a request.

    Returns:
        Lanes of the requests [A]; tokens before the first row of each [A] and up to its last [A]; the rows' tokens [R];
        the fields of their ``RaggedRows``.
    """
    lane, start, end = lanes[requests], np.empty(requests.size, np.int64), np.empty(requests.size, np.int64)
    context = np.empty(requests.size, np.int32)
    for i in range(requests.size):
        start[i] = context[i] = read[requests[i]]
        end[i] = min(lengths[requests[i]], start[i] + most)
    rows = fill_rows(tables, block_size, lane, start, end - start)
    return lane, context, end, tokens_at(texts, rows[1], rows[2]), rows


@kernel
def slots_before(tables: Int32, block_size: int, lanes: Ints, positions: Ints) -> Ints:
    """[R] KV slots of the tokens before those at ``positions`` [R] of ``lanes`` [R]; of a text's first, its own."""
    slots = np.empty(positions.size, np.int64)
    for i in range(slots.size):
        before = max(positions[i] - 1, 0)
        slots[i] = np.int64(tables[lanes[i], before // block_size]) * block_size + before % block_size
    return slots


@kernel
def rows_at(states: Floats, places: npt.NDArray[np.signedinteger]) -> Floats:
    """[r, …] rows of ``states``."""
    rows = np.empty((places.size, states.shape[1]), np.float32)
    for i in range(places.size):
        rows[i] = states[places[i]]
    return rows


@kernel
def columns_of(rows: Floats, columns: Ints) -> Floats:
    """[r, columns] of ``rows`` [r, …]."""
    found = np.empty((rows.shape[0], columns.size), np.float32)
    for i in range(rows.shape[0]):
        for j in range(columns.size):
            found[i, j] = rows[i, columns[j]]
    return found
