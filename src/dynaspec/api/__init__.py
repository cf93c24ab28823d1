"""``LLM`` for scripts, ``AsyncLLM`` for servers. Names and meaning are vLLM's."""

from __future__ import annotations

import dynaspec.engine.threads  # noqa: F401  # first: it says how PyTorch's threads wait

# isort: split
from .async_llm import AsyncLLM
from .llm import LLM

__all__ = ["LLM", "AsyncLLM"]
