"""What suffix decoding may be told: the keys ``suffix_decoding_…``, with vLLM's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SuffixSettings:
    """See ``SpeculativeConfig``'s keys of these names, with ``suffix_decoding_`` before them."""

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_cached_tokens: int = 4_000_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


_DEFAULTS = SuffixSettings()
DEFAULTS: Mapping[str, Any] = {f"suffix_decoding_{name}": getattr(_DEFAULTS, name) for name in SuffixSettings.__slots__}
KEYS = tuple(DEFAULTS)
DEPTH_KEY = "suffix_decoding_max_tree_depth"
ONLY_HERE = ("suffix_decoding_max_cached_tokens",)
"""Keys that vLLM does not have."""
