"""What comes of what lookups offer. It shows in every step, in those too that draft none of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynaspec.compiled import kernel
from dynaspec.contract.proposer import Ints, Offers

_NOTHING = (0, 0, 0)


def view_columns(offers: Sequence[Offers | None]) -> tuple[tuple[tuple[int, int], ...] | None, ...]:
    """``StepView.offers``.

    Args:
        offers: of each proposer.
    """
    return tuple([None if one is None else tuple(map(tuple, one.found.tolist())) for one in offers])


@kernel
def compare(found: Ints, tokens: Ints, texts: npt.NDArray[np.int32], lanes: Ints, starts: Ints, ends: Ints) -> Ints:
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
    """``StepOutcome.came_true``.

    Args:
        offers: of each proposer, as it was asked when the texts ended at ``starts``.
        texts, lanes, starts, ends: see ``compare``.
    """
    columns: list[tuple[tuple[int, int, int], ...] | None] = []
    for one in offers:
        if one is None:
            columns.append(None)
            continue
        if not one.found.any():
            columns.append((_NOTHING,) * len(one.found))
            continue
        columns.append(tuple(map(tuple, compare(one.found, one.tokens, texts, lanes, starts, ends).tolist())))
    return tuple(columns) if columns.count(None) < len(columns) else ()
