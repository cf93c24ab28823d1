"""A head's tensors under one set of names, whichever project has written them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.weights import Checkpoint

PICKLED = "pytorch_model.bin"
"""Where a head's tensors are if there are no *.safetensors."""
_BARE = ("lm_head.", "d2t", "t2d")


class HeadTensors:
    """Satisfies what ``Reader`` asks of a checkpoint. Names are those of ``speculators``."""

    def __init__(self, directory: Path, under: str = "") -> None:
        """
        Args:
            under: beginning of the names, as they are stored, of the tensors to read; others may be there.

        Raises:
            CheckpointError: no weights, or a file that cannot be read.
        """
        self.directory = directory
        self._tensors = {_own_name(name): tensor for name, tensor in _read(directory, under).items()}
        self._taken: set[str] = set()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name, as they are stored."""
        return dict(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """See ``weights.Checkpoint``."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.directory} lacks the tensor {name}, of shape {list(shape)}")
        tensor = self._tensors[name]
        if list(tensor.shape) != list(shape):
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)} in {self.directory}; its config and the target need "
                f"{list(shape)}"
            )
        self._taken.add(name)
        return tensor

    def ignore(self, names: Iterable[str]) -> None:
        """See ``weights.Checkpoint``."""
        self._taken.update(names)

    def check_all_taken(self) -> None:
        """See ``weights.Checkpoint``."""
        left = sorted(set(self._tensors) - self._taken)
        if left:
            raise CheckpointError(
                f"{self.directory} holds {len(left)} tensors that a head with its config has no place for, "
                f"such as {left[0]}"
            )


def _own_name(name: str) -> str:
    if not name.startswith(_BARE):
        name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _read(directory: Path, under: str) -> dict[str, torch.Tensor]:
    pickled = directory / PICKLED
    if any(directory.glob("*.safetensors")) or not pickled.is_file():
        return Checkpoint(directory).read_all(under)
    try:
        state = torch.load(pickled, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{pickled} is not a readable PyTorch checkpoint: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CheckpointError(f"{pickled} holds other things than tensors; expected a state dict")
    return {name: tensor for name, tensor in state.items() if name.startswith(under)}
