"""``auto``: draft lengths from measured cost and learnt acceptance, with no tuning."""

from __future__ import annotations

from .controller import AutoController

__all__ = ["AutoController"]
