"""``auto``: draft lengths from measured cost and learnt acceptance, with no tuning; see ``docs/auto.md``."""

from __future__ import annotations

from ..estimate.settings import AutoSettings
from .controller import AutoController, CachedPlan

__all__ = ["AutoController", "AutoSettings", "CachedPlan"]
