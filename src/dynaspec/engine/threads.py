"""Loads PyTorch with threads that sleep while they wait. To be imported before anything else that loads it."""

from __future__ import annotations

from dynaspec.runtime import prepare

prepare()
