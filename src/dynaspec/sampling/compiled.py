"""How functions are compiled to machine code, with types that survive it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """A function called from Python: releases the GIL, is kept on disk, and never reorders float arithmetic."""
    return cast(F, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def inlined(function: F) -> F:
    """A function called from kernels only, small enough to become part of their loops."""
    return cast(F, numba.njit(inline="always", error_model="numpy")(function))


def subroutine(function: F) -> F:
    """A function called from kernels only."""
    return cast(F, numba.njit(error_model="numpy")(function))
