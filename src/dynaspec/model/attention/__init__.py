"""Paged attention: which backend for which device."""

from __future__ import annotations

import torch

from .base import AttentionBackend, AttentionSpec
from .reference import ReferenceAttention


def attention_backend(spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The fastest paged attention for a device and dtype. Imports, and so compiles, that one only."""
    if device.type == "cuda":
        from .cuda import CudaAttention

        return CudaAttention(spec, device, dtype)
    if device.type == "cpu" and dtype == torch.float32:
        from .cpu import CpuAttention

        return CpuAttention(spec, torch.get_num_threads())
    return ReferenceAttention(spec, device)
