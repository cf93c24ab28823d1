"""Runs a compiled function on several threads at once: PyTorch's own OpenMP team.

A decoding step has dozens of products of some ten microseconds. Waking a thread costs more than that, so the threads
must be those that PyTorch's operators keep warm, and no second set may compete with them for the cores.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import torch  # noqa: F401  loads the OpenMP runtime that is looked for here
from numba import types

logger = logging.getLogger(__name__)

_PARALLEL = "GOMP_parallel"
_NUMBER = "omp_get_thread_num"


def _runtime() -> ctypes.CDLL | None:
    """GNU's OpenMP runtime as PyTorch has loaded it, if that is the one it uses."""
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:
        return None
    loaded = next((entry for entry in maps if "/libgomp" in entry), None)
    return None if loaded is None else ctypes.CDLL(loaded)


def _register() -> bool:
    runtime = _runtime()
    if runtime is None:
        logger.info("PyTorch here does not use GNU OpenMP: matrix products run on one thread")
        return False
    for name in (_PARALLEL, _NUMBER):
        llvm.add_symbol(name, ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value)
    return True


available = _register()
"""Whether ``parallel`` and ``thread_number`` may be called."""

parallel: Any = types.ExternalFunction(_PARALLEL, types.void(types.intp, types.intp, types.uint32, types.uint32))
"""(address of a C function of one pointer, that pointer, threads, 0): runs the function on so many threads."""
thread_number: Any = types.ExternalFunction(_NUMBER, types.int32())
"""Which of them the calling one is."""
