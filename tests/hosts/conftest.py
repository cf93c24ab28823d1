"""Tests that need another engine than dynaspec's own, in an environment of its own: ``make test-hosts``."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [name for name in ("speculators", "vllm") if not find_spec(name)]
