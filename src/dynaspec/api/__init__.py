"""``LLM`` for scripts, ``AsyncLLM`` for servers. Names and meaning are vLLM's."""

from __future__ import annotations

from .async_llm import AsyncLLM
from .llm import LLM

__all__ = ["LLM", "AsyncLLM"]
