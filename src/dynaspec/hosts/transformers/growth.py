"""Inputs that are as long as the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)


def grown(inputs: Mapping[str, Any], length: int, is_encoder_decoder: bool) -> dict[str, Any]:
    """Masks, positions and token types for a text of ``length``, whatever length they were prepared for."""
    longer = _prepare_attention_mask(dict(inputs), length, is_encoder_decoder)
    longer = _prepare_position_ids(longer, length, is_encoder_decoder)
    result: dict[str, Any] = _prepare_token_type_ids(longer, length)
    return result
