"""``auto``: draft lengths from measured cost and learnt acceptance, with no tuning; see ``docs/auto.md``."""

from __future__ import annotations

from .cached import CachedPlan
from .controller import AutoController
from .settings import AutoSettings
from .warm_up import load_kernels

__all__ = ["AutoController", "AutoSettings", "CachedPlan", "load_kernels"]
