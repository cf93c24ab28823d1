"""``auto``: draft lengths from measured cost and learnt acceptance, with no tuning."""

from __future__ import annotations

from .controller import AutoController
from .warm_up import load_kernels

__all__ = ["AutoController", "load_kernels"]
