"""Garbage collection beside steps of a few milliseconds."""

from __future__ import annotations

import gc


def settle() -> None:
    """Leaves what exists now out of the collections to come: a full one over all objects of PyTorch and numba takes
    150 ms, in the middle of some step.

    For processes that live as long as their engine, and for measurements: what of it becomes garbage stays until this
    is called again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
