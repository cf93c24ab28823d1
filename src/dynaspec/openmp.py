"""How the threads of a model pass wait for each other's next product.

Worker threads that spin for long make a small product beside a busy process twenty times slower; threads that never
spin must be woken for each of a step's many products. A few milliseconds of spinning, at most, bridge the host's work
between steps (a pause is far longer on Intel than on AMD).
"""

from __future__ import annotations

import os

SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "30000"}
"""What importing dynaspec sets where nothing is set."""


def prepare() -> None:
    """Without effect once torch has loaded its OpenMP runtime, which reads them then."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
