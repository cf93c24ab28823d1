"""vLLM's engine as ``LLM`` needs it. Needs vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.hosts.vllm.llm import VllmEngine


class EngineOnVllm(VllmEngine):
    """With dynaspec's tokenizer, for chats; vLLM has its own for prompts."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The arguments of vLLM's ``EngineArgs``."""
        return self.arguments

    @cached_property
    def tokenizer(self) -> Tokenizer:
        given = self.arguments
        own = given.get("tokenizer")
        return Tokenizer(
            own or given["model"],
            revision=given.get("tokenizer_revision") if own else given.get("revision"),
            trust_remote_code=given.get("trust_remote_code", False),
        )
