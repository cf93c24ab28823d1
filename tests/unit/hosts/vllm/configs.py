"""vLLM's configuration, as far as it is read."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any


def vllm_config(
    told: Mapping[str, Any],
    *,
    vocab: int = 4096,
    longest: int = 5,
    max_model_len: int = 128,
    max_num_seqs: int = 4,
    world_size: int = 1,
    ranks: int = 1,
    dtype: str = "torch.float32",
) -> Any:
    """
    Args:
        told: dynaspec's part of ``additional_config``.
        longest: vLLM's ``num_speculative_tokens``.
    """
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="target", max_model_len=max_model_len, dtype=dtype, get_vocab_size=lambda: vocab
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(world_size=world_size, data_parallel_size=ranks),
        speculative_config=SimpleNamespace(num_speculative_tokens=longest),
        additional_config={"dynaspec": dict(told)},
    )
