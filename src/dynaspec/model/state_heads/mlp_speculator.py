"""An MLP speculator (Wertheimer et al., 2404.19124): a small recurrent network over the target's last hidden state.

Step i, with n steps, state s and the newest token t, drafted ones included:

    s ← GELU(LN_i(proj_i(s) + (ew / sw) · emb_i(t))),  logits = head_i(s)
    sw = 0.5^(0.5 / n),  ew = √((1 − sw²) · inner / 2)

LN(x) = w · x / √(mean(x²) + 1e-6) + b. The first s is the target's state after the final norm, with ``scale_input``
normed without weights and divided by √2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from dynaspec.contract.errors import CheckpointError
from dynaspec.model.decoder import Model, ops_for
from dynaspec.model.head_tensors import PICKLED, HeadTensors, open_tensors
from dynaspec.model.linear import Linear, Quantization
from dynaspec.model.ops import Norm, Ops
from dynaspec.model.weights import find_checkpoint, read_json

from .base import kernels, on_cpu, reader_of

if TYPE_CHECKING:
    from dynaspec.model.kernels.state_heads import CompiledHeads, CompiledMlp

_WHAT = "an MLP speculator"
_EPS = 1e-6
_LSTM = ("forget_emb.", "input_emb.", "cell_emb.", "output_emb.")
"""Beginnings of the names of tensors of an LSTM speculator."""


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """Sizes."""

    steps: int
    inner: int
    tied: bool
    """All steps share embedding, norm and output, and all but the first the projection."""
    scaled: bool
    """See ``scale_input`` above."""

    @property
    def embedding_scale(self) -> float:
        """ew / sw"""
        state: float = 0.5 ** (0.5 / self.steps)
        return float(((1.0 - state**2) * self.inner / 2.0) ** 0.5) / state


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Ready to run; a column has an entry a step, the same one several times where they are tied."""

    embedding: torch.Tensor
    """[steps, or 1 for all of them, vocabulary, inner]"""
    projections: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    """Without their biases."""
    biases: torch.Tensor
    """[steps, inner] of the norms."""
    outputs: tuple[Linear, ...]
    first_norm: Norm | None
    """Of the target's states."""


class MlpSpeculator:
    """See ``StateHeads``."""

    vocabulary: npt.NDArray[np.int64] | None = None

    def __init__(self, config: MlpConfig, weights: MlpWeights, target: Model) -> None:
        self.longest = config.steps
        self.width, self.vocab_size = target.config.hidden_size, target.config.vocab_size
        self.device, self.dtype = target.device, target.dtype
        self._scale = config.embedding_scale
        self._weights = weights
        self._ops: Ops = ops_for(self.device)
        self.compiled: CompiledHeads | None = _compile(config, weights) if on_cpu(target) else None

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``StateHeads``."""
        if self.compiled is not None:
            return torch.from_numpy(kernels().mlp_begin(self.compiled, hidden.numpy()))
        norm = self._weights.first_norm
        return hidden if norm is None else self._ops.norm(hidden, norm)

    def run(self, head: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``StateHeads``."""
        if self.compiled is not None:
            state = torch.from_numpy(kernels().mlp_step(self.compiled, head, state.numpy(), tokens.numpy()))
            return state, torch.from_numpy(kernels().mlp_logits(self.compiled, head, state.numpy()))
        weights = self._weights
        embedded = F.embedding(tokens, weights.embedding[head % len(weights.embedding)])
        mixed = weights.projections[head](state) + self._scale * embedded
        state = F.gelu(self._ops.norm(mixed, weights.norms[head]) + weights.biases[head])
        return state, weights.outputs[head](state).float()


def load_mlp_speculator(
    path_or_id: str, target: Model, *, revision: str | None = None, quantization: Quantization | None = None
) -> MlpSpeculator:
    """Loads one in the target's dtype, on its device.

    Args:
        path_or_id: a directory or a repository of the Hugging Face hub, see ``docs/heads.md``.
        target: whose hidden states it reads.
        quantization: see ``load_model``; of its own matrices.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, corrupt, made for another target, or of another kind.
    """
    directory = find_checkpoint(path_or_id, revision, (PICKLED,))
    path = directory / "config.json"
    raw = read_json(path)
    tensors = open_tensors(directory, _WHAT).under("speculator.")
    _check_kind(path, raw, tensors)
    config = read_config(path, raw, target)
    weights = _read_weights(tensors, config, target, quantization)
    tensors.check_all_taken()
    return MlpSpeculator(config, weights, target)


def _check_kind(path: Path, raw: Mapping[str, Any], tensors: HeadTensors) -> None:
    if raw.get("tie_lstm_embs") or raw.get("method") == "sum_lstm" or any(n.startswith(_LSTM) for n in tensors.names):
        raise CheckpointError(
            f"{path.parent} is an LSTM speculator (Arctic), which is not available in this version; expected an MLP "
            "speculator"
        )


def read_config(path: Path, raw: Mapping[str, Any], target: Model) -> MlpConfig:
    """
    Args:
        path: of the file, for messages; ``raw`` is its JSON.

    Raises:
        CheckpointError: something is missing, or not the target's.
    """
    for key in ("vocab_size", "emb_dim", "n_predict"):
        if type(raw.get(key)) is not int or raw[key] < 1:
            raise CheckpointError(f"{path}: {key} is {raw.get(key)!r}; expected a number of at least 1")
    inner = raw.get("inner_dim", 0)
    if type(inner) is not int or inner < 0:
        raise CheckpointError(f"{path}: inner_dim is {inner!r}; expected a number of at least 0")
    for key, wanted in (("emb_dim", target.config.hidden_size), ("vocab_size", target.config.vocab_size)):
        if raw[key] != wanted:
            raise CheckpointError(
                f"{path}: {key} is {raw[key]}, but the target's is {wanted}; expected a speculator made for this target"
            )
    return MlpConfig(
        raw["n_predict"],
        inner or raw["emb_dim"],
        tied=bool(raw.get("tie_weights", False)),
        scaled=bool(raw.get("scale_input", False)),
    )


def _read_weights(
    tensors: HeadTensors, config: MlpConfig, target: Model, quantization: Quantization | None
) -> MlpWeights:
    reader, inner = reader_of(tensors, target, quantization), config.inner
    width, vocab_size = target.config.hidden_size, target.config.vocab_size
    own = range(1 if config.tied else config.steps)  # steps with an embedding, norm and output of their own
    if config.tied:  # a file may hold them again under every step's name
        parts = ("emb.{i}.weight", "ln.{i}.weight", "ln.{i}.bias", "head.{i}.weight")
        tensors.ignore(part.format(i=i) for part in parts for i in range(1, config.steps))
        tensors.ignore(f"proj.{i}.weight" for i in range(2, config.steps))
    projections = [
        reader.linear([f"proj.{i}"], [inner], inner if i else width)
        for i in range(min(config.steps, 2) if config.tied else config.steps)
    ]
    norms = [Norm(reader.tensor(f"ln.{i}.weight", inner), None, _EPS) for i in own]
    biases = [reader.tensor(f"ln.{i}.bias", inner) for i in own]
    outputs = [reader.linear([f"head.{i}"], [vocab_size], inner) for i in own]
    embedding = torch.empty(len(own), vocab_size, inner, dtype=target.dtype, device=target.device)
    for i in own:  # one at a time: they may be most of the checkpoint
        embedding[i] = reader.tensor(f"emb.{i}.weight", vocab_size, inner)
    half = torch.full((width,), 0.5**0.5, dtype=target.dtype, device=target.device)
    steps, last = range(config.steps), len(own) - 1
    return MlpWeights(
        embedding=embedding,
        projections=tuple(projections[min(i, len(projections) - 1)] for i in steps),
        norms=tuple(norms[min(i, last)] for i in steps),
        biases=torch.stack([biases[min(i, last)] for i in steps]),
        outputs=tuple(outputs[min(i, last)] for i in steps),
        first_norm=Norm(half, None, _EPS) if config.scaled else None,
    )


def _compile(config: MlpConfig, weights: MlpWeights) -> CompiledMlp:
    from dynaspec.model.cpu_decoder import matrix_row, norm_row
    from dynaspec.model.kernels.state_heads import CompiledMlp
    from dynaspec.model.kernels.team import team_size

    rows = zip(weights.projections, weights.norms, weights.outputs, strict=True)
    return CompiledMlp(
        embedding=weights.embedding.numpy(),
        embedding_scale=np.float32(config.embedding_scale),
        table=np.array([[*matrix_row(p), *norm_row(n), *matrix_row(o)] for p, n, o in rows], np.int64),
        biases=weights.biases.numpy(),
        first_norm=np.array(norm_row(weights.first_norm), np.int64),
        eps=_EPS,
        threads=team_size(torch.get_num_threads()),
    )
