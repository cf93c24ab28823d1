"""Heads: drafters of a decoder layer or a few that read hidden states of their target and keep KV of their own.

EAGLE-1 and 2 (Li et al., 2401.15077, 2406.16858), EAGLE-3 (2503.01840), and the prediction layers of targets that were
trained to predict several tokens (MTP; Gloeckle et al., 2404.19737).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynaspec.model.decoder import Model
from dynaspec.model.linear import Quantization, check_quantization

from .eagle import load_eagle
from .eagle3 import load_eagle3
from .head import Head
from .mtp import load_mtp

_LOADERS: Mapping[str, Callable[..., Head]] = {"eagle": load_eagle, "eagle3": load_eagle3, "mtp": load_mtp}


def load_head(
    method: str,
    path_or_id: str,
    target: Model,
    *,
    revision: str | None = None,
    quantization: Quantization | None = None,
) -> Head:
    """Loads a head in its target's dtype, on its device.

    Args:
        method: ``eagle``, ``eagle3`` or ``mtp``.
        path_or_id: a directory or a repository of the Hugging Face hub, in a layout of ``docs/eagle3.md``.
        target: whose hidden states it reads; embedding and output layer are shared where the checkpoint has none.
        quantization: see ``load_model``; of the head's own matrices.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, corrupt, quantised, or made for another target.
        ConfigError: the quantization is not available where the target runs.
    """
    check_quantization(quantization, target.device, target.dtype)
    return _LOADERS[method](path_or_id, target, revision=revision, quantization=quantization)
