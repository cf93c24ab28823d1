"""Recognising rows of logits that no token can be drawn from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def finite_rows(logits: torch.Tensor) -> npt.NDArray[np.bool_]:
    """[R] whether a row [R, V] has a finite maximum: no NaN, no +∞, and not −∞ throughout (some −∞ is allowed)."""
    return torch.isfinite(logits.amax(-1)).cpu().numpy()
