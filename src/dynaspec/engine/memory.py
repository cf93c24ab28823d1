"""How much memory the KV cache gets when nobody says."""

from __future__ import annotations

import os

import torch

_CPU_SHARE = 0.25
_CUDA_SHARE = 0.9


def default_kv_memory(device: torch.device) -> int:
    """Bytes: a quarter of the memory available on CPU, 90 % of what is free on CUDA."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    return int(pages * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)
