"""The engine: configuration, construction, the step, and what surrounds it."""

from __future__ import annotations

from dynaspec.runtime import prepare

prepare()  # before the engine's modules load PyTorch
