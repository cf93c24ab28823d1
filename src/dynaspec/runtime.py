"""The process that an engine runs in: how PyTorch's threads wait, and when garbage is collected.

Importing ``dynaspec`` does none of this. Loading what builds engines does the first (``engine.threads``); those who own
the process do the rest: the command line, servers and measurements.
"""

from __future__ import annotations

import gc
import os
import sys

_WAIT_POLICY = ("OMP_WAIT_POLICY", "passive")
"""Threads of PyTorch's sleep between its few operations. The engine's products run on threads of its own
(``model.kernels.team``); threads that spin while they wait would take the cores from them."""


def prepare() -> None:
    """Loads PyTorch with threads that sleep while they wait, unless the environment says how they wait.

    OpenMP reads the environment once, when PyTorch is loaded, so the variable is set for as long as that takes and
    ``os.environ`` is afterwards what it was. Without effect where PyTorch is loaded already.
    """
    name, value = _WAIT_POLICY
    if "torch" in sys.modules or name in os.environ:
        return
    os.environ[name] = value
    try:
        import torch  # noqa: F401
    finally:
        del os.environ[name]


def prepare_process() -> None:
    """The same for a process of dynaspec's own and those that it starts, without loading PyTorch yet."""
    os.environ.setdefault(*_WAIT_POLICY)


def settle() -> None:
    """Leaves what exists now out of the collections to come: a full one over all objects of PyTorch and numba takes
    150 ms, in the middle of some step.

    For processes that live as long as their engine, and for measurements: what of it becomes garbage stays until this
    is called again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
