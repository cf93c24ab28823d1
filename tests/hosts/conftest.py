"""Tests that need another engine than dynaspec's own, in an environment of its own: ``make test-hosts``."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["vllm"]
