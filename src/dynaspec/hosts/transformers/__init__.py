"""Hugging Face Transformers as a host: its assisted generation, with draft lengths chosen by dynaspec's controllers."""

from __future__ import annotations

from .threads import wait_as_usual

wait_as_usual()  # before torch is loaded

# isort: split
from .generate import generate  # noqa: E402
from .session import Session  # noqa: E402

__all__ = ["Session", "generate"]
