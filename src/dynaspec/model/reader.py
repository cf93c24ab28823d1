"""Turns a checkpoint's tensors into the parts of a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynaspec.contract.errors import CheckpointError

from .config import DecoderConfig
from .linear import Linear, LinearFactory, Quantization, can_pack, of_head
from .ops import Norm
from .weights import BlockSource, TensorSource


class Reader:
    """Reads tensors by name, checks their shapes, and builds linear layers and norms in the model's dtype."""

    def __init__(
        self,
        checkpoint: TensorSource,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        product_dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            dtype: of activations.
            product_dtype: see ``Model``; None = the same.
            quantization: of linear layers, see ``linear.Quantization``; embeddings and norms stay as they are. None =
                as the checkpoint has them.
        """
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._config = config
        self._device = device
        self._dtype = dtype
        self._linear = LinearFactory(device, dtype, product_dtype)

    def prefix(self, candidates: Sequence[str], anchor: str) -> str:
        """The first prefix under which ``anchor`` exists: checkpoints of the bare model leave out the outer one."""
        found = (prefix for prefix in candidates if prefix + anchor in self._checkpoint)
        return next(found, candidates[0])

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._checkpoint.take(name, shape).to(device=self._device, dtype=self._dtype)

    def positions(self, name: str, offset: int = 0) -> torch.Tensor:
        """A table of learned positions, [positions, hidden], without its first ``offset`` rows."""
        return self.tensor(name, self._config.learned_positions + offset, self._config.hidden_size)[offset:]

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Norm ``name``.weight (and ``name``.bias for layer norms), as wide as the model if no width is given."""
        width = width or self._config.hidden_size
        weight = self._checkpoint.take(f"{name}.weight", (width,)).to(self._device)
        bias = self.tensor(f"{name}.bias", width) if self._config.norm == "layer" else None
        if self._config.norm == "rms_plus_one":
            weight = 1 + weight.float()  # stays float32: 1 + w does not fit into half precision
        else:
            weight = weight.to(self._dtype)
        return Norm(weight, bias, self._config.norm_eps)

    def optional_norm(self, name: str, width: int | None = None) -> Norm | None:
        """``norm``, or None where the checkpoint has none of this name."""
        return self.norm(name, width) if f"{name}.weight" in self._checkpoint else None

    def linear(self, names: Sequence[str], outs: Sequence[int], width: int, bias: bool = False) -> Linear:
        """The layers ``names``, each [out, width], fused into one in this order."""
        weights = [
            self._matrix(f"{name}.weight", out, width, self._quantization)
            for name, out in zip(names, outs, strict=True)
        ]
        if len({weight.shape[2:] for weight in weights}) > 1:  # blocks of different forms, or beside numbers
            weights = [self.tensor(f"{name}.weight", out, width) for name, out in zip(names, outs, strict=True)]
        biases = [self.tensor(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)] if bias else []
        return self.build(torch.cat(weights), torch.cat(biases) if bias else None)

    def build(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """A layer from weight [out, in], which may be blocks already, and bias [out] that the family has put in
        order."""
        return self._linear(self._quantised(weight, "a matrix", self._quantization), bias)

    def head(self, name: str, embedding: torch.Tensor, bias: bool = False, tied: str | None = None) -> Linear:
        """The output layer, see ``linear.of_head``: the embedding itself where the config ties them.

        Args:
            tied: the embedding's name in the checkpoint, which may have blocks of it.
        """
        form, (out, width) = of_head(self._quantization), embedding.shape
        if self._config.tied_embeddings:
            self._checkpoint.ignore([f"{name}.weight"])
            stored = None if tied is None else self._blocks(f"{tied}.weight", out, width, form)
            weight = self._quantised(embedding, name, form) if stored is None else stored
        else:
            weight = self._matrix(f"{name}.weight", out, width, form)
        return self.build(weight, self.tensor(f"{name}.bias", out) if bias else None)

    def _matrix(self, name: str, out: int, width: int, form: Quantization | None) -> torch.Tensor:
        """A weight as ``build`` takes it."""
        stored = self._blocks(name, out, width, form)
        return self._quantised(self.tensor(name, out, width), name, form) if stored is None else stored

    def _blocks(self, name: str, out: int, width: int, form: Quantization | None) -> torch.Tensor | None:
        if not can_pack(self._device, self._dtype) or not isinstance(self._checkpoint, BlockSource):
            return None
        return self._checkpoint.blocks(name, (out, width), form)

    def _quantised(self, weight: torch.Tensor, name: str, form: Quantization | None) -> torch.Tensor:
        if form is None or weight.dtype == torch.uint8:
            return weight
        from .kernels.integer_blocks import quantise_int4, quantise_int8  # only where they are used: compiled for CPU

        quantise = {"int8": quantise_int8, "int4": quantise_int4}[form]
        try:
            return torch.from_numpy(quantise(weight.numpy()))
        except ValueError as error:
            raise CheckpointError(f"{name} cannot be quantised to {form}: {error}") from None
