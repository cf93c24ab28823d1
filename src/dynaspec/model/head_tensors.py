"""The tensors of a head's checkpoint, whichever file they are in."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from dynaspec.contract.errors import CheckpointError

from .weights import Checkpoint

PICKLED = "pytorch_model.bin"
"""Where a head's tensors are if there are no *.safetensors."""
_BARE = ("lm_head.", "d2t", "t2d")
"""What the names of a decoder head's tensors begin with that are never under ``model.``."""


class HeadTensors:
    """Satisfies ``weights.TensorSource``. A tensor is read when it is taken: there may be a whole model's beside them.

    Args:
        where: file or directory, for messages.
        what: what they make up, for messages.
        read: by name, what reads each.
        prefix: of the names in the file, which callers leave out.
    """

    def __init__(
        self, where: Path, what: str, read: Mapping[str, Callable[[], torch.Tensor]], prefix: str = ""
    ) -> None:
        self.where, self.what = where, what
        self._prefix = prefix
        self._read = {name.removeprefix(prefix): one for name, one in read.items() if name.startswith(prefix)}
        self._taken: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Without the prefix."""
        return tuple(self._read)

    def under(self, *prefixes: str) -> HeadTensors:
        """Those whose names begin with the first of the prefixes that there is; all of them if there is none."""
        found = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in self._read)), "")
        return HeadTensors(self.where, self.what, self._read, found)

    def only(self, beginning: str) -> HeadTensors:
        """Those whose names begin so, under their whole names."""
        return HeadTensors(
            self.where, self.what, {name: read for name, read in self._read.items() if name.startswith(beginning)}
        )

    def renamed(self, name_of: Callable[[str], str]) -> HeadTensors:
        """The same under other names."""
        return HeadTensors(self.where, self.what, {name_of(name): read for name, read in self._read.items()})

    def __contains__(self, name: str) -> bool:
        return name in self._read

    def shape(self, name: str) -> list[int] | None:
        """None = there is no such tensor."""
        return list(self._read[name]().shape) if name in self._read else None

    def tensor(self, name: str) -> torch.Tensor:
        """One that is there, whatever its shape; it still is to be taken."""
        return self._read[name]()

    def read(self, name: str) -> torch.Tensor:
        """One that is there, whatever its shape."""
        self._taken.add(name)
        return self._read[name]()

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """See ``TensorSource``."""
        if name not in self._read:
            raise CheckpointError(f"{self.where} lacks the tensor {self._prefix}{name}, of shape {list(shape)}")
        tensor = self._read[name]()
        if list(tensor.shape) != list(shape):
            raise CheckpointError(
                f"{self._prefix}{name} has shape {list(tensor.shape)} in {self.where}; the target, and the head's "
                f"config, need {list(shape)}"
            )
        self._taken.add(name)
        return tensor

    def ignore(self, names: Iterable[str]) -> None:
        """See ``TensorSource``."""
        self._taken.update(names)

    def check_all_taken(self) -> None:
        """See ``TensorSource``."""
        left = sorted(set(self._read) - self._taken)
        if left:
            raise CheckpointError(
                f"{self.where} holds {len(left)} tensors that {self.what} has no place for, such as "
                f"{self._prefix}{left[0]}"
            )


def open_tensors(directory: Path, what: str, files: Sequence[str] = ()) -> HeadTensors:
    """A checkpoint's tensors.

    Args:
        what: what they make up, for messages.
        files: names of files that hold nothing else; the first one that is there is read. Else safetensors, else
            ``PICKLED``.

    Raises:
        CheckpointError: no weights, or a file that cannot be read.
    """
    name = next((name for name in files if (directory / name).is_file()), None)
    if name is None and not any(directory.glob("*.safetensors")) and (directory / PICKLED).is_file():
        name = PICKLED
    if name is not None and not name.endswith(".safetensors"):
        return HeadTensors(directory / name, what, _unpickled(directory / name))
    checkpoint = Checkpoint(directory, None if name is None else [name])
    read = {one: partial(checkpoint.tensor, one) for one in checkpoint.names}
    return HeadTensors(checkpoint.where, what, read)


def decoder_head_tensors(directory: Path, under: str = "") -> HeadTensors:
    """A decoder head's tensors under the names of ``speculators``, whichever project has written them.

    Args:
        under: beginning of the names, as they are stored, of the tensors to read; others may be there.

    Raises:
        CheckpointError: no weights, or a file that cannot be read.
    """
    return open_tensors(directory, "a head with its config").only(under).renamed(_own_name)


def _own_name(name: str) -> str:
    if not name.startswith(_BARE):
        name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _unpickled(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} is not a readable PyTorch checkpoint: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path} holds other things than tensors; expected a state dict")
    return {name: _known(tensor) for name, tensor in state.items()}


def _known(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor
