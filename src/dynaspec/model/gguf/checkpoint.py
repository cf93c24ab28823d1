"""The tensors of a GGUF file, under Hugging Face's names: what was done to them when the file was made is undone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.linear import Quantization

from .file import KINDS, GgufFile, StoredTensor

Change = Literal["rows by pairs", "one added"]
"""``rows by pairs``: the rows of query and key heads are ordered for GPT-J's rotation, each pair side by side, where
Hugging Face has the firsts of all pairs before the seconds. ``one added``: norms multiply by what is stored."""

_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"}
_HEAD_NORMS = {f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"}
_MLP = {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
_FUSED = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TWO_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_FOUR_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYERS: Mapping[str, Mapping[str, str]] = {
    "llama": _ATTENTION | _MLP | _TWO_NORMS,
    "qwen2": _ATTENTION | _MLP | _TWO_NORMS,
    "qwen3": _ATTENTION | _MLP | _TWO_NORMS | _HEAD_NORMS,
    "gemma2": _ATTENTION | _MLP | _FOUR_NORMS,
    "gemma3": _ATTENTION | _MLP | _FOUR_NORMS | _HEAD_NORMS,
    "phi3": _FUSED | _TWO_NORMS,
}

ARCHITECTURES = tuple(_LAYERS)
"""In the files' own words."""
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
"""Tensors that belong to the config: what the frequencies of the rotation are divided by."""
_KINDS: Mapping[Quantization, tuple[Kind, ...]] = {"int8": (Kind.Q8_0,), "int4": (Kind.Q4_1, Kind.Q4_0)}
"""Those whose blocks a form takes."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from."""

    name: str
    """In the file."""
    change: Change | None
    """To be undone."""


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
        self._sources = _sources(file.architecture, layers)
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
        tensor = self._file.numbers(stored, self._quantised)
        return tensor if source.change is None else _undo(source.change, tensor, self._head_dim)

    def blocks(self, name: str, shape: Sequence[int], form: Quantization | None) -> torch.Tensor | None:
        """See ``weights.BlockSource``: those of Q8_0 are int8's, those of Q4_1 and Q4_0 int4's."""
        source, stored = self._find(name, shape)
        if form is None or stored.kind not in _KINDS[form]:
            return None
        _, size = GGML_QUANT_SIZES[stored.kind]
        found = self._file.data(stored).reshape(stored.shape[0], -1, size).copy()
        if stored.kind == Kind.Q4_0:
            from dynaspec.model.kernels.integer_blocks import from_symmetric  # only where it is used: compiles for CPU

            try:
                found = from_symmetric(found)
            except ValueError as error:
                raise CheckpointError(f"{self._file.path} has the tensor {stored.name} in Q4_0: {error}") from None
        rows = torch.from_numpy(found)
        return rows if source.change is None else _undo(source.change, rows, self._head_dim)

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


def _sources(architecture: str, layers: int) -> dict[str, Source]:
    """By Hugging Face's names, all tensors that there may be.

    Args:
        architecture: one of ``ARCHITECTURES``.
    """
    names = dict(_ENDS)
    for index in range(layers):
        names |= {f"model.layers.{index}.{ours}": f"blk.{index}.{it}" for ours, it in _LAYERS[architecture].items()}
    return {
        f"{ours}.{part}": Source(f"{it}.{part}", _change(architecture, ours))
        for ours, it in names.items()
        for part in ("weight", "bias")
    }


def _change(architecture: str, name: str) -> Change | None:
    if architecture == "llama" and name.endswith(("q_proj", "k_proj")):
        return "rows by pairs"
    if architecture.startswith("gemma") and name.endswith("norm"):
        return "one added"
    return None


def _undo(change: Change, tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A tensor as Hugging Face has it.

    Args:
        tensor: [heads · head_dim, …] for rows by pairs.
    """
    if change == "one added":
        return tensor.float() - 1
    pairs = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
