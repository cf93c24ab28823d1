"""One small file a family: maps a Hugging Face config to ``DecoderConfig`` and weight names to parts."""

from __future__ import annotations

from typing import Any, Protocol

from dynaspec.model.config import DecoderConfig
from dynaspec.model.layer import Weights
from dynaspec.model.reader import Reader

from . import codegen, gemma2, gemma3, gpt2, gpt_neox, gptj, llama, opt, phi3, qwen2, qwen3


class Family(Protocol):
    """What each module of this package provides."""

    @property
    def ARCHITECTURES(self) -> tuple[str, ...]:  # noqa: N802
        """Names in a config's ``architectures``."""
        ...

    def config(self, hf: Any, max_model_len: int | None) -> DecoderConfig:
        """Raises ``UnsupportedVariantError`` for what the family could be but the decoder cannot do."""
        ...

    def weights(self, reader: Reader, config: DecoderConfig) -> Weights: ...


_MODULES: tuple[Family, ...] = (llama, qwen2, qwen3, gemma2, gemma3, phi3, opt, gpt_neox, gpt2, gptj, codegen)

FAMILIES: dict[str, Family] = {name: module for module in _MODULES for name in module.ARCHITECTURES}
"""By architecture name."""
