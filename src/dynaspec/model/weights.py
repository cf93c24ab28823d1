"""Finding a checkpoint and reading its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from dynaspec.contract.errors import CheckpointError

from .linear import Quantization

_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.txt", "*.model")
HEADS_BESIDE = "medusa_head."
"""Beginning of the names of tensors that draft, in a checkpoint that holds the target and its heads."""
GGUF = ".gguf"
"""How the names of such files end."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HARMLESS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias",
             "causal_mask")  # fmt: skip
"""Ends of names of constants that older checkpoints carry and nothing needs."""
PREDICTION_LAYERS = "model.mtp_layers."
"""Beginning of names of what drafts for a model in its own checkpoint (method ``mtp``); the model runs without."""


def is_gguf(path_or_id: str) -> bool:
    """Whether this names a GGUF file, be it there or not."""
    return path_or_id.lower().endswith(GGUF)


def find_checkpoint(path_or_id: str, revision: str | None = None, more: Sequence[str] = ()) -> Path:
    """A local directory or GGUF file as it is, or a snapshot of a Hugging Face repository.

    Args:
        more: names of files that are wanted beside those of models.

    Raises:
        CheckpointError: there is no such file or directory, and the hub has no such repository or cannot be reached.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        if is_gguf(path_or_id):
            return path
        raise CheckpointError(
            f"{path_or_id} is a file; expected a directory with config.json and *.safetensors, or a *{GGUF} file"
        )
    if is_gguf(path_or_id):
        raise CheckpointError(f"there is no file {path_or_id}; expected a local *{GGUF} file")
    if path.is_absolute() or path_or_id.startswith((".", "~")) or path_or_id.count("/") > 1:
        raise CheckpointError(f"there is no directory {path_or_id}; expected a checkpoint's directory or a hub id")
    return _download(path_or_id, revision, (*_FILES, *more))


def _download(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the client's own, HTTP and file errors, all of them final
        raise CheckpointError(
            f"there is no directory {repo!r}, and {_why_not_fetched(error, revision)}; expected a checkpoint's "
            f"directory, a *{GGUF} file or a hub id"
        ) from error


def _why_not_fetched(error: Exception, revision: str | None) -> str:
    """In words of our own: the hub's name addresses and requests."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the Hugging Face hub gives that repository only to those who were granted it, by their HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the Hugging Face hub has no such repository, or HF_TOKEN may not read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hugging Face hub's repository has no revision {revision!r}"
    if isinstance(error, errors.HFValidationError):
        return "it is no name of a repository of the Hugging Face hub"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectionError):
        return "the Hugging Face hub cannot be reached"
    return f"it could not be fetched from the Hugging Face hub ({type(error).__name__}: {_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: no such file, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value


class TensorSource(Protocol):
    """The tensors of a checkpoint under Hugging Face's names; keeps account of what was taken."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor, in the dtype it is kept in.

        Raises:
            CheckpointError: it is not there or has another shape.
        """
        ...

    def ignore(self, names: Iterable[str]) -> None:
        """These tensors may be there without being needed."""
        ...

    def check_all_taken(self) -> None:
        """Raises CheckpointError if a tensor is left that nobody asked for: it is not the model it says it is."""
        ...


@runtime_checkable
class BlockSource(Protocol):
    """A source that may have quantised matrices already."""

    def blocks(self, name: str, shape: Sequence[int], form: Quantization | None) -> torch.Tensor | None:
        """[out, groups, bytes] the blocks of a matrix [out, in] in a form, without rounding its numbers; None: it is
        stored otherwise.

        Args:
            form: None = the one that the source keeps it in, if it wants that kept.

        Raises:
            CheckpointError: it is not there or has another shape.
        """
        ...


class Checkpoint:
    """See ``TensorSource``: those of a directory of safetensors files.

    Args:
        names: of files there; None = those of the model.

    Raises:
        CheckpointError: no safetensors files, a file that the index names is missing, or a file is corrupt.
    """

    def __init__(self, directory: Path, names: Sequence[str] | None = None) -> None:
        self.directory = directory
        self._handles = {name: _open(directory / name) for name in names or _file_names(directory)}
        self._home = {tensor: handle for handle in self._handles.values() for tensor in handle.keys()}  # noqa: SIM118
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._home

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return tuple(self._home)

    @property
    def where(self) -> Path:
        """The file, if it is one; else the directory."""
        return self.directory / next(iter(self._handles)) if len(self._handles) == 1 else self.directory

    def tensor(self, name: str) -> torch.Tensor:
        """One that is there, whatever its shape."""
        tensor: torch.Tensor = self._home[name].get_tensor(name)
        return tensor

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """See ``TensorSource``."""
        if name not in self._home:
            raise CheckpointError(f"{self.directory} lacks the tensor {name}, of shape {list(shape)}")
        handle = self._home[name]
        found = list(handle.get_slice(name).get_shape())
        if found != list(shape):
            raise CheckpointError(f"{name} has shape {found} in {self.directory}; its config needs {list(shape)}")
        self._taken.add(name)
        tensor: torch.Tensor = handle.get_tensor(name)
        return tensor

    def ignore(self, names: Iterable[str]) -> None:
        """See ``TensorSource``."""
        self._taken.update(names)

    def check_all_taken(self) -> None:
        """See ``TensorSource``."""
        left = sorted(name for name in self._home if name not in self._taken and not _harmless(name))
        if left:
            raise CheckpointError(
                f"{self.directory} holds {len(left)} tensors that its config has no place for, such as {left[0]}"
            )


def _harmless(name: str) -> bool:
    return name.endswith(_HARMLESS) or name.startswith((HEADS_BESIDE, PREDICTION_LAYERS))


def _file_names(directory: Path) -> list[str]:
    if (directory / _INDEX).is_file():
        index = read_json(directory / _INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{directory / _INDEX} has no weight_map; expected tensor names and their files")
        return sorted(set(weight_map.values()))
    if (directory / _SINGLE).is_file():
        return [_SINGLE]
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise CheckpointError(
            f"{directory} has no *.safetensors files; of other weight formats only GGUF is read, from a *{GGUF} file"
        )
    return names


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path.parent} lacks {path.name}, which its index names")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {_first_line(error)}") from error
