"""How PyTorch's threads wait for its next parallel operation: asleep.

The engine's products run on threads of their own (``model.kernels.team``). Threads of PyTorch's that look for work
after each of its few operations would take these the cores.
"""

from __future__ import annotations

import os

SETTINGS = {"OMP_WAIT_POLICY": "passive"}
"""What importing dynaspec sets where nothing is set."""


def prepare() -> None:
    """Without effect once torch has loaded its OpenMP runtime, which reads them then."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
