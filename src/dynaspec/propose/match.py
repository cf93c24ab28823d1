"""The search behind prompt lookup, compiled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit


@njit(cache=True, nogil=True)
def longest_match(tokens: npt.NDArray[np.int32], length: int, min_n: int, max_n: int, wanted: int) -> tuple[int, int]:
    """Where the end of a text has occurred before.

    Prefers the longest match of the text's last ``min_n`` … ``max_n`` tokens; among equals one that ``wanted``
    tokens follow (or as many as there are), among those the most recent.

    Args:
        tokens: [≥ length] the text.

    Returns:
        (length of the match, index of the token that follows it); (0, length) if there is none.
    """
    best_n, best_follow, best_next = 0, 0, length
    for end in range(length - 2, min_n - 2, -1):
        n = 0
        while n < max_n and n <= end and tokens[end - n] == tokens[length - 1 - n]:
            n += 1
        follow = min(length - 1 - end, wanted)
        if n >= min_n and (n > best_n or (n == best_n and follow > best_follow)):
            best_n, best_follow, best_next = n, follow, end + 1
            if n == max_n and follow == wanted:
                break
    return best_n, best_next
