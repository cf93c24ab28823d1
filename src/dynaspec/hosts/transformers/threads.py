"""How PyTorch's threads wait for work: as they do without dynaspec.

Importing dynaspec asks OpenMP for threads that soon go to sleep, which suits its own engine. A model of Transformers'
leaves longer gaps between its products, so that every one of them would have to wake the threads again: a pass would
take about a sixth more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from dynaspec.openmp import SETTINGS


def without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables but for those that importing dynaspec has set."""
    ours = all(environ.get(name) == value for name, value in SETTINGS.items())
    return {name: value for name, value in environ.items() if not (ours and name in SETTINGS)}


def wait_as_usual() -> None:
    """Takes back what importing dynaspec has set. Without effect once torch is loaded, as it reads it then."""
    if "torch" in sys.modules:
        return
    for name in os.environ.keys() - without_ours(os.environ).keys():
        del os.environ[name]
