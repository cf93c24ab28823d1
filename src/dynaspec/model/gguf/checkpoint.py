"""The tensors of a GGUF file, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.quantization import Quantization

from .dequantise import KINDS, numbers
from .file import GgufFile, StoredTensor
from .names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, Source, sources, undo

_KINDS: Mapping[Quantization, tuple[Kind, ...]] = {"int8": (Kind.Q8_0,), "int4": (Kind.Q4_1, Kind.Q4_0)}
"""Those whose blocks a form takes."""


class GgufCheckpoint:
    """See ``weights.TensorSource``.

    Raises:
        CheckpointError: a tensor is quantised in a way that is not read.
    """

    def __init__(self, file: GgufFile, layers: int, head_dim: int, quantised: torch.dtype) -> None:
        """
        Args:
            quantised: dtype that quantised tensors are rounded to; others stay as they are stored.
        """
        self._file = file
        self._sources = sources(file.architecture, layers)
        self._head_dim = head_dim
        self._quantised = quantised
        self._taken = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}  # the config has read those
        for tensor in file.tensors.values():
            if tensor.kind not in KINDS:
                known = ", ".join(kind.name for kind in KINDS)
                raise CheckpointError(
                    f"{file.path} has the tensor {tensor.name} in {tensor.kind.name}, a quantisation that is not read; "
                    f"expected one of {known}"
                )

    def __contains__(self, name: str) -> bool:
        source = self._sources.get(name)
        return source is not None and source.name in self._file.tensors

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """See ``TensorSource``."""
        source, stored = self._find(name, shape)
        tensor = numbers(self._file.data(stored), stored.kind, stored.shape, self._quantised)
        return tensor if source.change is None else undo(source.change, tensor, self._head_dim)

    def blocks(self, name: str, shape: Sequence[int], form: Quantization) -> torch.Tensor | None:
        """See ``weights.BlockSource``: those of Q8_0 are int8's, those of Q4_1 and Q4_0 int4's."""
        source, stored = self._find(name, shape)
        if stored.kind not in _KINDS[form]:
            return None
        _, size = GGML_QUANT_SIZES[stored.kind]
        found = self._file.data(stored).reshape(stored.shape[0], -1, size).copy()
        if stored.kind == Kind.Q4_0:
            from dynaspec.model.kernels.int4 import from_symmetric  # only where it is used: compiles for CPU

            try:
                found = from_symmetric(found)
            except ValueError as error:
                raise CheckpointError(f"{self._file.path} has the tensor {stored.name} in Q4_0: {error}") from None
        rows = torch.from_numpy(found)
        return rows if source.change is None else undo(source.change, rows, self._head_dim)

    def ignore(self, names: Iterable[str]) -> None:
        """See ``TensorSource``."""
        self._taken.update(self._sources[name].name for name in names if name in self._sources)

    def check_all_taken(self) -> None:
        """See ``TensorSource``."""
        left = sorted(self._file.tensors.keys() - self._taken)
        if left:
            raise CheckpointError(
                f"{self._file.path} holds {len(left)} tensors that {self._file.architecture} has no place for, such as "
                f"{left[0]}"
            )

    def _find(self, name: str, shape: Sequence[int]) -> tuple[Source, StoredTensor]:
        """Where a tensor is, which counts as taken."""
        source = self._sources.get(name)
        stored = None if source is None else self._file.tensors.get(source.name)
        if source is None or stored is None:
            what = name if source is None else source.name
            raise CheckpointError(f"{self._file.path} lacks the tensor {what}, of shape {list(shape)}")
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"{stored.name} has shape {list(stored.shape)} in {self._file.path}; its keys need {list(shape)}"
            )
        self._taken.add(stored.name)
        return source, stored
