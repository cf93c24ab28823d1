"""What decision logs and profiles say: ``dynaspec explain`` and ``dynaspec recommend``."""

from __future__ import annotations
