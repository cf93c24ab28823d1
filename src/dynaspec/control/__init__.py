"""Draft-length policies and the configuration that chooses among them. No tensors, no clocks, no torch."""

from __future__ import annotations

from .config import SpeculativeConfig
from .registry import POLICIES, build_controller

__all__ = ["POLICIES", "SpeculativeConfig", "build_controller"]
