"""Checkpoints that others have quantised. Those of compressed-tensors whose weights alone are (W4A16, W8A16) are read;
all others are refused.

In place of a matrix ``x.weight`` [out, in] those of compressed-tensors hold

* ``x.weight_packed`` [out, ⌈in · bits / 32⌉] int32: numbers of 4 or 8 bits, the first one in a word's lowest bits;
* ``x.weight_scale`` [out, groups], of equally many consecutive inputs each;
* ``x.weight_zero_point`` [⌈out · bits / 32⌉, groups] int32, packed likewise but along outputs; none = half the range;
* ``x.weight_shape``: [out, in].

A weight is (number − zero point) · scale. The tensors say which matrices are quantised, and how.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynaspec.contract.errors import CheckpointError

from .linear import Quantization
from .weights import Checkpoint

METHOD = "compressed-tensors"
"""Its name in ``quantization_config``."""
_FORMAT = "pack-quantized"
_BITS = (4, 8)
_STRATEGIES = ("group", "channel")
_PARTS = ("packed", "scale", "zero_point", "shape")
_GROUP = 32
"""Inputs of a block, as in ``kernels.gemm``, which is imported only where it is used."""


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a tensor holds numbers, rather than what some quantisation has made of them."""
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def check_not_quantised(directory: Path, config: Mapping[str, Any]) -> None:
    """
    Args:
        config: the checkpoint's config.json.

    Raises:
        CheckpointError: its weights are not plain numbers.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return
    method = found.get("quant_method") or found.get("quant_algo") if isinstance(found, dict) else found
    raise CheckpointError(quantised_with(directory, method or "a method that its config.json does not name"))


def quantised_with(directory: Path, what: str) -> str:
    """The sentence that refuses a checkpoint."""
    return (
        f"{directory} is quantised with {what}, which is not read; "
        "expected float32, bfloat16 or float16 weights, or a GGUF file (quantization='int8' or 'int4' quantises those "
        "when they are loaded), or a model in compressed-tensors' format pack-quantized, whose weights alone are "
        "quantised, to integers of 4 or 8 bits, by group or channel"
    )


def is_compressed(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has matrices that ``CompressedCheckpoint`` reads.

    Args:
        config: the checkpoint's config.json.

    Raises:
        CheckpointError: they are quantised otherwise.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if isinstance(found, dict) and found.get("quant_method") == METHOD:
        _check_readable(directory, found)
        return True
    check_not_quantised(directory, config)
    return False


def _check_readable(directory: Path, found: Mapping[str, Any]) -> None:
    """
    Args:
        found: ``quantization_config`` of the checkpoint.

    Raises:
        CheckpointError: more than weights is quantised, or weights in a way that is not read.
    """
    wrong = next(_unreadable(found), None)
    if wrong is not None:
        raise CheckpointError(quantised_with(directory, f"{METHOD}, {wrong}"))


def _unreadable(found: Mapping[str, Any]) -> Iterator[str]:
    if found.get("format") != _FORMAT:
        yield f"format {found.get('format')!r}"
    for key in ("kv_cache_scheme", "transform_config"):
        if found.get(key):
            yield f"with a {key}"
    sparsity = found.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        yield f"with sparsity in the format {sparsity['format']!r}"
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        yield "without config_groups"
        return
    for name, scheme in groups.items():
        if not isinstance(scheme, dict) or not isinstance(scheme.get("weights"), dict):
            yield f"{name} without weights"
            return
        weights = scheme["weights"]
        if scheme.get("input_activations") or scheme.get("output_activations"):
            yield f"{name} with quantised activations"
        if scheme.get("format", _FORMAT) not in (None, _FORMAT):
            yield f"{name} in the format {scheme['format']!r}"
        if weights.get("type", "int") != "int" or weights.get("num_bits") not in _BITS:
            yield f"{name} with weights of {weights.get('num_bits')} bits of type {weights.get('type', 'int')!r}"
        if weights.get("strategy") not in _STRATEGIES:
            yield f"{name} with scales by {weights.get('strategy')!r}"
        if weights.get("actorder") not in (None, False, "static", "weight"):
            yield f"{name} with actorder {weights['actorder']!r}"


@dataclass(frozen=True)
class PackedMatrix:
    """A quantised matrix: weight = (number − zero) · scale, where scale and zero are those of the input's group."""

    numbers: torch.Tensor
    """[out, in] uint8"""
    scale: torch.Tensor
    """[out, groups] in the checkpoint's dtype"""
    zero: torch.Tensor | None
    """[out, groups] uint8; None: half the range, all over"""
    bits: int

    @property
    def form(self) -> Quantization | None:
        """The form that takes it block by block; None: there is none."""
        groups, width = self.scale.shape[1], self.numbers.shape[1]
        if groups > 1 and width // groups % _GROUP:
            return None
        if self.bits == 8:
            return "int8" if self.zero is None else None  # its blocks have no minimum
        return "int4"

    def widened(self) -> torch.Tensor:
        """[out, in] float32: the weights."""
        zero = torch.tensor(1 << self.bits - 1) if self.zero is None else self._spread(self.zero)
        return (self.numbers.float() - zero.float()) * self._spread(self.scale.float())

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.repeat_interleave(self.numbers.shape[1] // self.scale.shape[1], dim=1)

    def blocks(self) -> torch.Tensor:
        """[out, blocks, bytes] those of ``form``. Scales and minimums become the nearest float16, numbers stay.

        Raises:
            ValueError: a scale or minimum is infinite, undefined or larger than float16 goes.
        """
        rows, width = self.numbers.shape
        count = -(-width // _GROUP)
        scale = self.scale.half()
        numbers = torch.zeros(rows, count * _GROUP, dtype=torch.uint8)
        if self.form == "int8":
            numbers[:, :width] = self.numbers ^ 0x80  # the same number with a sign
            heads, body = [scale], numbers.view(rows, count, _GROUP)
        else:
            numbers[:, :width] = self.numbers
            zero = 1 << self.bits - 1 if self.zero is None else self.zero.float()
            heads = [scale, (-zero * scale.float()).half()]
            low, high = numbers.view(rows, count, 2, _GROUP // 2).unbind(2)
            body = low | high << 4
        ends = torch.stack(heads, dim=2)
        if not ends.isfinite().all():
            raise ValueError(f"a scale is {self.scale.float().abs().max():g}; expected what float16 holds")
        ends = ends.repeat_interleave(count // self.scale.shape[1], dim=1)
        return torch.cat([ends.view(torch.uint8), body], dim=2)


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first ``count`` numbers of each row, [rows, count] uint8, of words [rows, n] int32."""
    octets = words.flatten().view(torch.uint8).view(len(words), -1)  # flat first: strides are odd where n is 1
    if bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], dim=2).flatten(1)
    return octets[:, :count].contiguous()


class CompressedCheckpoint(Checkpoint):
    """See ``weights.TensorSource`` and ``weights.BlockSource``: matrices that are quantised go by the names that they
    had before."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        ordered = next((name for name in self.names if name.endswith(".weight_g_idx")), None)
        if ordered is not None:
            raise CheckpointError(
                quantised_with(directory, f"{METHOD}, with inputs in an order of their own ({ordered})")
            )

    def __contains__(self, name: str) -> bool:
        return name in self._home or f"{name}_packed" in self._home

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """See ``TensorSource``; quantised ones in float32."""
        found = self._packed(name, shape)
        return super().take(name, shape) if found is None else found.widened()

    def blocks(self, name: str, shape: Sequence[int], form: Quantization | None) -> torch.Tensor | None:
        """See ``weights.BlockSource``."""
        found = self._packed(name, shape)
        if found is None or found.form is None or form not in (None, found.form):
            return None
        try:
            return found.blocks()
        except ValueError as error:
            raise CheckpointError(f"{self.directory} has the matrix {name} with values out of range: {error}") from None

    def ignore(self, names: Iterable[str]) -> None:
        """See ``TensorSource``."""
        super().ignore(one for name in names for one in (name, *(f"{name}_{part}" for part in _PARTS)))

    def _packed(self, name: str, shape: Sequence[int]) -> PackedMatrix | None:
        """A matrix as it is stored, which counts as taken; None: it is not quantised."""
        if f"{name}_packed" not in self._home:
            return None
        stored = {part: self.tensor(f"{name}_{part}") for part in _PARTS if f"{name}_{part}" in self._home}
        self.ignore([name])
        lacking = next((part for part in ("scale", "shape") if part not in stored), None)
        if lacking is not None:
            raise CheckpointError(f"{self.directory} lacks the tensor {name}_{lacking}, beside {name}_packed")
        if stored["shape"].tolist() != list(shape):
            raise CheckpointError(
                f"{name} has shape {stored['shape'].tolist()} in {self.directory}; its config needs {list(shape)}"
            )
        out, width = shape
        words, scale, zero = stored["packed"], stored["scale"], stored.get("zero_point")
        bits = next((one for one in _BITS if _is(words, out, _words(width, one))), None)
        if bits is None:
            expected = " or ".join(str([out, _words(width, one)]) for one in _BITS)
            raise CheckpointError(_unlike(self.directory, f"{name}_packed", words, f"int32, {expected}"))
        if not scale.is_floating_point() or not _splits(scale, out, width):
            expected = f"{out} rows of scales for equal shares of {width} inputs"
            raise CheckpointError(_unlike(self.directory, f"{name}_scale", scale, expected))
        groups = scale.shape[1]
        if zero is not None:
            if not _is(zero, _words(out, bits), groups):
                expected = f"int32, {[_words(out, bits), groups]}"
                raise CheckpointError(_unlike(self.directory, f"{name}_zero_point", zero, expected))
            zero = unpack(zero.T, bits, out).T
        return PackedMatrix(unpack(words, bits, width), scale, zero, bits)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _splits(scale: torch.Tensor, out: int, width: int) -> bool:
    """Whether there are scales for equal shares of the inputs of every output."""
    return scale.dim() == 2 and len(scale) == out and scale.shape[1] > 0 and width % scale.shape[1] == 0


def _is(tensor: torch.Tensor, *shape: int) -> bool:
    return tensor.dtype == torch.int32 and tensor.shape == shape


def _unlike(directory: Path, name: str, found: torch.Tensor, expected: str) -> str:
    kind = str(found.dtype).removeprefix("torch.")
    return f"{name} is {kind}, {list(found.shape)}, in {directory}; expected {expected}"
