"""How the threads of a model pass wait for each other's next product.

Worker threads that spin for long make a small product beside a busy process twenty times slower; threads that never
spin must be woken for each of a step's many products. A few milliseconds of spinning, at most, bridge the host's work
between steps. How long a pause takes differs from processor to processor: on the fastest seen, 30,000 of them let
threads sleep up to twice a step, which made it 4 % longer, and 100,000 hardly ever.
"""

from __future__ import annotations

import os

SETTINGS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100000"}
"""What importing dynaspec sets where nothing is set."""


def prepare() -> None:
    """Without effect once torch has loaded its OpenMP runtime, which reads them then."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
