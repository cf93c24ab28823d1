"""What drafting needs of heads, and what they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dynaspec.model.decoder import Model
from dynaspec.model.head_tensors import HeadTensors
from dynaspec.model.linear import Quantization, check_quantization
from dynaspec.model.reader import Reader

if TYPE_CHECKING:
    from dynaspec.model.kernels.state_heads import CompiledHeads


class StateHeads(Protocol):
    """Heads on a target. What one head leaves to the next is called its state, [R, width]."""

    longest: int
    """Tokens that they can draft: heads, or steps of one."""
    width: int
    """Of the target's hidden states."""
    vocab_size: int
    """The target's."""
    vocabulary: npt.NDArray[np.int64] | None
    """[V] the target's ids of the tokens that logits are about; None = all, in their order."""
    device: torch.device
    dtype: torch.dtype
    compiled: CompiledHeads | None
    """The same for compiled code; None where heads have to be run from Python."""

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states [R, width] before each request's newest token → the first head's states."""
        ...

    def run(self, head: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One head.

        Args:
            head: 0 … ``longest`` − 1.
            state: [R, width] that the one before has left.
            tokens: [R] int64, the newest of each request, drafted ones included.

        Returns:
            The state for the next head; logits [R, V] float32.
        """
        ...


def reader_of(tensors: HeadTensors, target: Model, quantization: Quantization | None) -> Reader:
    """Reads layers in the target's dtype, on its device.

    Raises:
        ConfigError: the quantization is not available there.
    """
    check_quantization(quantization, target.device, target.dtype)
    return Reader(tensors, target.config, target.device, target.dtype, quantization, target.product_dtype)


def on_cpu(target: Model) -> bool:
    """Whether heads of this target run compiled."""
    return target.device.type == "cpu" and target.dtype == torch.float32


def kernels() -> Any:
    """``kernels.state_heads``, which compiles what it calls when it is imported: only where heads run on CPU."""
    from dynaspec.model.kernels import state_heads

    return state_heads
