"""Hugging Face Transformers as a host: its assisted generation, with draft lengths chosen by dynaspec's controllers."""

from __future__ import annotations

from .call import generate
from .session import Session

__all__ = ["Session", "generate"]
