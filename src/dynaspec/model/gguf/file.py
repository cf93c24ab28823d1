"""The GGUF format: a header of keys and values, a table of tensors, and their data, mapped into memory.

Also the numbers that the data stand for, where they are quantised.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGUFValueType, dequantize
from gguf import GGMLQuantizationType as Kind

from dynaspec.contract.errors import CheckpointError

T = TypeVar("T", int, float, str, bool)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Of the data, where the file does not say."""
_MOST_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

_PLAIN = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_QUANTISED = (
    *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ4_NL, Kind.IQ4_XS),
)
KINDS = (*_PLAIN, *_QUANTISED)
"""What is read."""
_CHUNK = 1 << 15
"""Numbers that are worked on at a time: the package's arithmetic takes several times their memory, which stays in the
cache, and PyTorch rounds so few without waking its threads. A pass over whole tensors takes three times as long."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as PyTorch has it; the file has it the other way round."""
    kind: Kind
    start: int
    """First byte, from the beginning of the file."""
    size: int
    """Bytes."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that it has as it is; None: it is quantised."""
        return _PLAIN.get(self.kind)


class GgufFile:
    """A file's keys and values, and its tensors by name.

    Raises:
        CheckpointError: not a GGUF file, damaged, or cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _mapped(path)
        reader = _HeaderReader(path, self._map)
        tensors, pairs = reader.begin()
        self._metadata = reader.metadata(pairs)
        self.tensors: Mapping[str, StoredTensor] = reader.tensors(tensors, self._alignment())
        parts = self.get("split.count", int) or 1
        if parts > 1:
            raise CheckpointError(f"{path} is one of {parts} parts; expected a file that holds the whole model")

    @property
    def architecture(self) -> str:
        return self.need("general.architecture", str)

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of a key; None if the file lacks it.

        Raises:
            CheckpointError: it is of another kind.
        """
        value = self._metadata.get(key)
        if isinstance(value, list) and value and kind is not str and all(item == value[0] for item in value):
            value = value[0]  # one number a layer, where all layers are alike
        if value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        raise CheckpointError(f"{self.path} has {_described(value)} for {key}; expected {_WORDS[kind]}")

    def need(self, key: str, kind: type[T]) -> T:
        """The same of a key that has to be there."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path} has no {key}; expected {_WORDS[kind]}")
        return value

    def items(self, key: str, kind: type[T]) -> list[T] | None:
        """The value of a key that is a list; None if the file lacks it.

        Raises:
            CheckpointError: it is no list, or one of another kind.
        """
        value = self._metadata.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, kind) for item in value)):
            raise CheckpointError(
                f"{self.path} has {_described(value)} for {key}; expected a list, each {_WORDS[kind]}"
            )
        return value

    def is_list(self, key: str) -> bool:
        return isinstance(self._metadata.get(key), list)

    def data(self, tensor: StoredTensor) -> npt.NDArray[np.uint8]:
        """[size] the tensor's bytes, which are the file's own."""
        return np.frombuffer(self._map, np.uint8, tensor.size, tensor.start)

    def numbers(self, tensor: StoredTensor, quantised: torch.dtype) -> torch.Tensor:
        """A tensor's numbers, in memory of their own.

        Args:
            tensor: of a kind in ``KINDS``.
            quantised: what quantised numbers become, rounded to nearest; others keep their dtype.
        """
        data, kind = self.data(tensor), tensor.kind
        if tensor.dtype is not None:
            return torch.from_numpy(data.copy()).view(tensor.dtype).view(tensor.shape)
        out = torch.empty(tensor.shape, dtype=quantised).view(-1)
        block, size = GGML_QUANT_SIZES[kind]
        step = _CHUNK // block
        for first in range(0, data.size // size, step):
            found = torch.from_numpy(dequantize(data[first * size : (first + step) * size], kind))
            out[first * block : first * block + found.numel()] = found
        return out.view(tensor.shape)

    def _alignment(self) -> int:
        found = self.get("general.alignment", int)
        alignment = _ALIGNMENT if found is None else found
        if alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path} has {alignment} for general.alignment; expected a power of two")
        return alignment


_WORDS: dict[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _described(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:60]


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: no bytes
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error


class _HeaderReader:
    """Reads a file's header from its beginning, checking that every byte is there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def begin(self) -> tuple[int, int]:
        """Number of tensors, number of keys."""
        if self._data[:4] != _MAGIC:
            raise CheckpointError(f"{self._path} does not begin with {_MAGIC.decode()}; expected a GGUF file")
        self._at = 4
        version, tensors, pairs = self._values("IQQ")
        if version not in _VERSIONS:
            known = " or ".join(map(str, _VERSIONS))
            raise CheckpointError(f"{self._path} is GGUF version {version}; expected {known}, little-endian")
        return tensors, pairs

    def metadata(self, pairs: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in found:
                raise CheckpointError(f"{self._path} has the key {key} twice; expected it once")
            found[key] = self._value(key)
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, StoredTensor]:
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._text()
            (dimensions,) = self._values("I")
            if dimensions > _MOST_DIMENSIONS or name in found:
                what = "twice" if name in found else f"with {dimensions} dimensions"
                raise CheckpointError(
                    f"{self._path} has the tensor {name} {what}; expected it once, with {_MOST_DIMENSIONS} at most"
                )
            shape = self._values(f"{dimensions}Q")[::-1]
            found[name] = (shape, *self._values("IQ"))
        start = -(-self._at // alignment) * alignment
        return {name: self._placed(name, shape, kind, start + at) for name, (shape, kind, at) in found.items()}

    def _placed(self, name: str, shape: tuple[int, ...], number: int, start: int) -> StoredTensor:
        """A row of the tensor table, checked."""
        try:
            kind = Kind(number)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path} has the tensor {name} in quantisation {number}, which the package gguf does not know"
            ) from error
        block, size = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise CheckpointError(
                f"{self._path} has the tensor {name} of shape {list(shape)} in {kind.name}; expected rows of a "
                f"multiple of {block}"
            )
        tensor = StoredTensor(name, shape, kind, start, prod(shape) // block * size)
        if tensor.start + tensor.size > len(self._data):
            raise CheckpointError(
                f"{self._path} ends at byte {len(self._data)}, within or before the tensor {name}; expected bytes "
                f"{tensor.start} … {tensor.start + tensor.size}"
            )
        return tensor

    def _value(self, key: str) -> Any:
        (number,) = self._values("I")
        if number == GGUFValueType.STRING:
            return self._text()
        if number != GGUFValueType.ARRAY:
            return self._values(self._format(key, number))[0]
        number, count = self._values("IQ")
        if number == GGUFValueType.STRING:
            self._check(8 * count)
            return [self._text() for _ in range(count)]
        layout = self._format(key, number)
        self._check(struct.calcsize(f"<{layout}") * count)
        return list(self._values(f"{count}{layout}"))

    def _format(self, key: str, number: int) -> str:
        try:
            return _SCALARS[GGUFValueType(number)]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{self._path} has a value of type {number} for {key}, which is not read") from error

    def _text(self) -> str:
        (length,) = self._values("Q")
        self._check(length)
        start, self._at = self._at, self._at + length
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path} has bytes at {start} that are no text; expected UTF-8") from error

    def _values(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{layout}")
        self._check(size)
        found = struct.unpack_from(f"<{layout}", self._data, self._at)
        self._at += size
        return found

    def _check(self, size: int) -> None:
        """Raises CheckpointError unless so many bytes follow."""
        if self._at + size > len(self._data):
            raise CheckpointError(
                f"{self._path} ends at byte {len(self._data)}, within its header; expected {size} bytes at {self._at}"
            )
