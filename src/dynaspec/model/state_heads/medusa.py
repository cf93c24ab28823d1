"""Medusa heads (Cai et al., 2401.10774), as chains: head j drafts one token beyond what head j − 1 does.

All of them read the same hidden state f, the target's last one: x ← x + SiLU(W x + b) from x = f, once a layer, then an
output layer over the vocabulary. Head 0 drafts the token after the newest, which the target drew from f itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.decoder import Model
from dynaspec.model.head_tensors import PICKLED, HeadTensors, open_tensors
from dynaspec.model.linear import Linear, Quantization
from dynaspec.model.reader import Reader
from dynaspec.model.weights import HEADS_BESIDE, find_checkpoint, read_json

from .base import kernels, on_cpu, reader_of

if TYPE_CHECKING:
    from dynaspec.model.kernels.state_heads import CompiledHeads, CompiledMedusa

_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_WHAT = "a Medusa checkpoint"


class _Dialect(NamedTuple):
    """How one project names tensors."""

    layer: str
    """Layer j of head i, without ``.weight``."""
    output: str
    """The output layer of head i, after n layers."""


_ORIGINAL = _Dialect("{i}.{j}.linear", "{i}.{n}")
_CONVERTED = _Dialect("blocks.{i}.layers.{j}", "lm_heads.{i}")
_LAYER = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)(?:\.linear)?\.weight")
"""A layer's weight in either dialect; the original's output layers count as one layer more."""
_SHARED, _KNOWN = "lm_head", "token_map"


@dataclass(frozen=True, slots=True)
class MedusaWeights:
    """Ready to run."""

    blocks: tuple[tuple[Linear, ...], ...]
    """[heads][layers]"""
    outputs: tuple[Linear, ...]
    """[heads] → [R, V]; the same one several times where heads share it."""
    vocabulary: npt.NDArray[np.int64] | None
    """[V] the target's ids; None where they are the same."""


class MedusaHeads:
    """See ``StateHeads``. A head's state is the target's, whichever head it is."""

    def __init__(self, weights: MedusaWeights, target: Model) -> None:
        self.longest = len(weights.outputs)
        self.width, self.vocab_size = target.config.hidden_size, target.config.vocab_size
        self.vocabulary = weights.vocabulary
        self.device, self.dtype = target.device, target.dtype
        self._weights = weights
        self.compiled: CompiledHeads | None = _compile(weights) if on_cpu(target) else None

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``StateHeads``."""
        return hidden

    def run(self, head: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``StateHeads``."""
        if self.compiled is not None:
            return state, torch.from_numpy(kernels().medusa_logits(self.compiled, head, state.numpy()))
        x = state
        for layer in self._weights.blocks[head]:
            x = x + F.silu(layer(x))
        return state, self._weights.outputs[head](x).float()


def load_medusa(
    path_or_id: str, target: Model, *, revision: str | None = None, quantization: Quantization | None = None
) -> MedusaHeads:
    """Loads heads in the target's dtype, on its device.

    Args:
        path_or_id: a directory or a repository of the Hugging Face hub, in any layout of ``docs/heads.md``.
        target: whose hidden states they read.
        quantization: see ``load_model``; of the heads' own matrices.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, corrupt, or made for another target.
    """
    directory = find_checkpoint(path_or_id, revision, (*_FILES, PICKLED))
    path = directory / "config.json"
    config = read_json(path) if path.is_file() else {}
    if config.get("logit_scale", 1) != 1:
        raise CheckpointError(f"{path}: logit_scale is {config['logit_scale']!r}; expected 1")
    tensors = open_tensors(directory, _WHAT, _FILES).under(HEADS_BESIDE, "medusa_heads.")
    weights = _read_weights(tensors, config, target, quantization)
    tensors.check_all_taken()
    return MedusaHeads(weights, target)


def _read_weights(
    tensors: HeadTensors, config: Mapping[str, Any], target: Model, quantization: Quantization | None
) -> MedusaWeights:
    dialect = _CONVERTED if any(name.startswith("blocks.") for name in tensors.names) else _ORIGINAL
    heads, layers = _count(tensors, dialect, config)
    reader, width = reader_of(tensors, target, quantization), target.config.hidden_size
    blocks = []
    for i in range(heads):
        block: list[Linear] = []
        for j in range(layers):
            name = dialect.layer.format(i=i, j=j)
            # The original repeats one module, which a file may hold once.
            again = dialect is _ORIGINAL and block and f"{name}.weight" not in tensors
            block.append(block[0] if again else reader.linear([name], [width], width, f"{name}.bias" in tensors))
        blocks.append(tuple(block))
    known = _known(tensors, target)
    return MedusaWeights(
        tuple(blocks), _outputs(tensors, reader, dialect, config, (heads, layers), target, known), known
    )


def _count(tensors: HeadTensors, dialect: _Dialect, config: Mapping[str, Any]) -> tuple[int, int]:
    """Heads, and layers of each. The file decides: uploads' configs count fewer heads than there are."""
    found = [match for match in map(_LAYER.fullmatch, tensors.names) if match]
    told = config.get("medusa_num_heads", config.get("num_heads", 0)) or 0
    heads = max([told, *(1 + int(match[1]) for match in found)])
    if not heads:
        name = f"{dialect.layer.format(i=0, j=0)}.weight"
        raise CheckpointError(f"{tensors.where} lacks the tensor {name}, the first of Medusa heads")
    layers = max((1 + int(match[2]) for match in found if int(match[1]) == 0), default=1)
    last = f"0.{layers - 1}.weight" in tensors  # an output layer, not one of the block
    return heads, layers - (dialect is _ORIGINAL and last)


def _known(tensors: HeadTensors, target: Model) -> npt.NDArray[np.int64] | None:
    """[V] the target's ids of the tokens that heads draft; None = all."""
    if _KNOWN not in tensors:
        return None
    most = target.config.vocab_size
    ids = tensors.read(_KNOWN).to(torch.int64).numpy()
    if ids.ndim != 1 or not ids.size:
        raise CheckpointError(f"{_KNOWN} in {tensors.where} has shape {list(ids.shape)}; expected a list of token ids")
    if ids.min() < 0 or ids.max() >= most or len(np.unique(ids)) < ids.size:
        raise CheckpointError(
            f"{_KNOWN} in {tensors.where} has ids from {ids.min()} to {ids.max()}, {len(np.unique(ids))} different; "
            f"expected {ids.size} different ones below {most}, the target's vocabulary"
        )
    return ids


def _outputs(
    tensors: HeadTensors,
    reader: Reader,
    dialect: _Dialect,
    config: Mapping[str, Any],
    count: tuple[int, int],
    target: Model,
    known: npt.NDArray[np.int64] | None,
) -> tuple[Linear, ...]:
    heads, layers = count
    names = [dialect.output.format(i=i, n=layers) for i in range(heads)]
    if f"{_SHARED}.weight" in tensors:
        names = [_SHARED] * heads
    elif config.get("original_lm_head"):
        tensors.ignore(f"{name}.weight" for name in names[1:])
        names = names[:1] * heads
    read = {name: _output(tensors, reader, name, target, known) for name in dict.fromkeys(names)}
    return tuple(read[name] for name in names)


def _output(
    tensors: HeadTensors, reader: Reader, name: str, target: Model, known: npt.NDArray[np.int64] | None
) -> Linear:
    """An output layer over the whole vocabulary is cut to the tokens that heads draft, as vLLM does."""
    width, vocab_size = target.config.hidden_size, target.config.vocab_size
    if known is not None and tensors.shape(f"{name}.weight") == [vocab_size, width]:
        return reader.build(reader.tensor(f"{name}.weight", vocab_size, width)[torch.from_numpy(known)])
    return reader.linear([name], [vocab_size if known is None else len(known)], width)


def _compile(weights: MedusaWeights) -> CompiledMedusa:
    from dynaspec.model.cpu_decoder import matrix_row
    from dynaspec.model.kernels.decode import MATRIX
    from dynaspec.model.kernels.state_heads import CompiledMedusa
    from dynaspec.model.kernels.team import team_size

    blocks = np.array([[matrix_row(layer) for layer in block] for block in weights.blocks], np.int64)
    return CompiledMedusa(
        blocks=blocks.reshape(len(weights.blocks), -1, MATRIX),
        outputs=np.array([matrix_row(output) for output in weights.outputs], np.int64),
        threads=team_size(torch.get_num_threads()),
    )
