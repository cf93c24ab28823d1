"""Heads of one Llama decoder layer, EAGLE's and EAGLE-3's: what they have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynaspec.train.heads.attention import attend
from dynaspec.train.heads.batch import Batch
from dynaspec.train.heads.head import Depth, TrainedHead, going_on, sample_chains
from dynaspec.train.heads.rotary import rotary_tables, rotate
from dynaspec.train.heads.shape import HeadShape


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] to float32 of the same shape."""
        normed: Tensor = _Normalise.apply(x.float(), self._eps)  # type: ignore[no-untyped-call]
        return normed * self.weight


class _Normalise(torch.autograd.Function):
    """x / rms(x) in few passes over the memory: PyTorch's own takes a dozen on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        """[…, width] float32."""
        width = x.shape[-1]
        inverse = (torch.linalg.vecdot(x, x)[..., None] / width + eps).rsqrt_()
        normed: Tensor = x * inverse
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """The gradient loses its part along the output."""
        normed, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(upstream, normed)[..., None] / -normed.shape[-1]
        return torch.addcmul(upstream, normed, along).mul_(inverse), None


class Attention(nn.Module):
    """Projections only; how rows see each other is :mod:`dynaspec.train.heads.attention`'s business."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        """``width`` is that of what it reads."""
        super().__init__()
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Llama decoder layer without the norms before its attention, which reads rows of ``width``."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)


class DecoderHead(TrainedHead):
    """The layer, and what a kind of head has before and behind it; the embedding is the target's.

    The *state* is what a chain takes from one draft to the next, [rows, hidden].
    """

    fc: nn.Linear
    layers: nn.ModuleList

    def __init__(self, shape: HeadShape, ids: Tensor, embedding: Tensor, scale: Tensor) -> None:
        """``embedding`` is [vocab, hidden]; the rest is as in :class:`TrainedHead`."""
        super().__init__(ids, shape.vocab, scale)
        self.shape = shape
        self.register_buffer("embedding", embedding, persistent=False)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def layer(self) -> Layer:
        """The only decoder layer."""
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    @abstractmethod
    def fuse(self, states: Tensor) -> Tensor:
        """The target's hidden states [rows, states' width] to a chain's first state."""

    @abstractmethod
    def enter(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """For ``tokens`` [rows]: what the attention reads, [rows, width], and where the residual stream starts."""

    @abstractmethod
    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From the residual stream behind the layer: what the output layer reads, and the next draft's state."""

    def unroll(self, batch: Batch, depths: int, share: float = 1.0, seed: int = 0) -> Iterator[Depth]:
        """See :class:`TrainedHead`: the training-time test.

        At depth 0 all rows have the target's own states. At depth j a chain that started at row i stands at position
        i + j and feeds on its own last output.
        """
        layer = self.layer
        attention = layer.self_attn
        alive = torch.arange(batch.chains, device=batch.aux.device)
        states = self.fuse(batch.aux.to(self.get_buffer("embedding").dtype))
        read, residual = self.enter(batch.next_tokens, states)
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        keys = rotate(self._split(attention.k_proj(read)), cos[batch.positions], sin[batch.positions])
        values = self._split(attention.v_proj(read))
        lengths = [end - begin for begin, end in batch.row_spans]
        by_conversation = keys.split_with_sizes(lengths), values.split_with_sizes(lengths)

        rows, sampled = batch.chain_rows, sample_chains(batch, share, seed)
        read, residual = read[rows], residual[rows]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for depth in range(depths):
            at = batch.positions[rows[alive]] + depth
            queries = rotate(self._split(attention.q_proj(read)), cos[at], sin[at])
            if depth:
                own_keys.append(rotate(self._split(attention.k_proj(read)), cos[at], sin[at]))
                own_values.append(self._split(attention.v_proj(read)))
            x = residual + attention.o_proj(attend(batch, alive, queries, *by_conversation, own_keys, own_values))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            output, state = self.leave(x)
            yield Depth(alive, output)

            stay = going_on(batch, alive, depth, sampled)
            if depth + 1 == depths or not bool(stay.any()):
                return
            alive = alive[stay]
            own_keys, own_values = [k[stay] for k in own_keys], [v[stay] for v in own_values]
            read, residual = self.enter(batch.next_tokens[rows[alive] + depth + 1], state[stay])

    def _split(self, x: Tensor) -> Tensor:
        """[rows, heads · head_dim] to [rows, heads, head_dim]."""
        return x.view(len(x), -1, self.shape.head_dim)

    @torch.no_grad()
    def initialise_layer(self, generator: torch.Generator) -> None:
        """Random matrices; the layer hardly changes the residual stream at first."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and name.startswith(("fc.", "layers.")):
                std = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
