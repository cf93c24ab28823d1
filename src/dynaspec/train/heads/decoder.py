"""Heads of one Llama decoder layer, EAGLE's and EAGLE-3's: what they have in common.

Rows of a training batch see each other by the training-time test's mask. At depth 0 all rows see each other causally.
At depth j a chain that started at row i sees the depth-0 keys up to row i and, of its own chain, the keys of depths
1 … j.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .head import Batch, Depth, TrainedHead, going_on, sample_chains
from .shape import HeadShape


def rotary_tables(shape: HeadShape) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim], float32, for heads whose halves rotate against each other."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angles = torch.arange(shape.positions, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [rows, heads, head_dim] by the angles of its rows (cos, sin: [rows, head_dim]); dtype of ``x``."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos[:, None], turned, sin[:, None]).to(x.dtype)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What the chains ``alive`` [n] of ``batch`` attend with.

    ``queries`` [n, heads, head_dim]; ``keys`` and ``values`` [rows, kv_heads, head_dim] are of the texts, ``own_keys``
    and ``own_values``, [n, kv_heads, head_dim] for each depth, of the chains' own earlier drafts.
    """

    batch: Batch
    alive: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    own_keys: Sequence[Tensor]
    own_values: Sequence[Tensor]


def attend(given: AttentionInputs) -> Tensor:
    """[n, heads · head_dim]."""
    # Padding costs a CPU arithmetic; a GPU does all conversations in as few kernels as one.
    return attend_padded(given) if given.queries.is_cuda else attend_each(given)


def attend_padded(given: AttentionInputs) -> Tensor:
    """:func:`attend` for all conversations at once, padded to the longest."""
    batch, alive, queries, keys, values = given.batch, given.alive, given.queries, given.keys, given.values
    n, heads, width = queries.shape
    kv_heads, device, count = keys.shape[1], queries.device, len(batch.row_spans)
    begins = torch.tensor([begin for begin, _ in batch.row_spans], device=device)
    most_rows = max(end - begin for begin, end in batch.row_spans)
    most_chains = max(end - begin for begin, end in batch.chain_spans)
    # A row's position is its number in the conversation.
    of_row = torch.searchsorted(begins, torch.arange(len(keys), device=device), right=True) - 1
    row_slots = of_row * most_rows + batch.positions
    firsts = torch.tensor([begin for begin, _ in batch.chain_spans], device=device)
    of_chain = torch.searchsorted(firsts, alive, right=True) - 1
    slots = of_chain * most_chains + alive - firsts[of_chain]

    def padded(x: Tensor, places: Tensor, size: int) -> Tensor:
        out = x.new_zeros(count * size, *x.shape[1:]).index_copy(0, places, x)
        return out.view(count, size, *x.shape[1:])

    grouped = (queries * width**-0.5).view(n, kv_heads, heads // kv_heads, width)
    by_head = padded(grouped, slots, most_chains).permute(0, 2, 3, 1, 4).reshape(count * kv_heads, -1, width)
    keys_here = padded(keys, row_slots, most_rows).permute(0, 2, 3, 1).reshape(count * kv_heads, width, -1)
    values_here = padded(values, row_slots, most_rows).transpose(1, 2).reshape(count * kv_heads, -1, width)
    scores = torch.bmm(by_head, keys_here).view(count, kv_heads, -1, most_chains, most_rows)
    starts = padded(batch.chain_rows[alive] - begins[of_chain], slots, most_chains)
    unseen = torch.arange(most_rows, device=device) > starts[..., None]
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    depth = len(given.own_keys)
    if depth:
        own_keys = torch.stack(list(given.own_keys), dim=1)  # [n, depth, kv, d]
        own = (grouped[:, None] * own_keys[:, :, :, None]).sum(-1)  # [n, depth, kv, group]
        own_padded = padded(own.to(scores.dtype), slots, most_chains)
        scores = torch.cat([scores, own_padded.permute(0, 3, 4, 1, 2)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    on_rows, on_own = weights.split_with_sizes([most_rows, depth], dim=-1)
    mixed = torch.bmm(on_rows.reshape(count * kv_heads, -1, most_rows).to(values.dtype), values_here)
    mixed = mixed.view(count, kv_heads, -1, most_chains, width).permute(0, 3, 1, 2, 4)
    mixed = mixed.reshape(count * most_chains, kv_heads, -1, width).index_select(0, slots)
    if depth:
        of_own = on_own.permute(0, 3, 4, 1, 2).reshape(count * most_chains, depth, kv_heads, -1).index_select(0, slots)
        mixed = mixed + (of_own[..., None] * torch.stack(list(given.own_values), dim=1)[:, :, :, None]).sum(1)
    return mixed.reshape(n, heads * width)


def attend_each(given: AttentionInputs) -> Tensor:
    """:func:`attend` for one conversation after the other, as they differ in length."""
    batch, alive = given.batch, given.alive
    edges = torch.tensor([end for _, end in batch.chain_spans], device=alive.device)
    counts = torch.searchsorted(alive, edges).diff(prepend=edges.new_zeros(1)).tolist()
    lengths = [end - begin for begin, end in batch.row_spans]
    # Splits are undone by one concatenation in the backward pass; slices each by a tensor of zeros.
    keys_of, values_of = given.keys.split_with_sizes(lengths), given.values.split_with_sizes(lengths)
    starts, by_query = batch.chain_rows[alive].split_with_sizes(counts), given.queries.split_with_sizes(counts)
    by_key = [k.split_with_sizes(counts) for k in given.own_keys]
    by_value = [v.split_with_sizes(counts) for v in given.own_values]
    mixed = []
    for c, count in enumerate(counts):
        if count:
            first = batch.row_spans[c][0]
            mine, theirs = [k[c] for k in by_key], [v[c] for v in by_value]
            mixed.append(_attend_one(by_query[c], keys_of[c], values_of[c], mine, theirs, starts[c] - first))
    return torch.cat(mixed)


def _attend_one(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    starts: Tensor,
) -> Tensor:
    """One conversation: queries [n, heads, d], keys and values [rows, kv_heads, d], own ones [n, kv_heads, d] each."""
    n, heads, width = queries.shape
    rows, kv_heads, _ = keys.shape
    grouped = (queries * width**-0.5).view(n, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)
    by_head = grouped.reshape(kv_heads, -1, width)  # [kv, group · n, d]
    scores = torch.bmm(by_head, keys.permute(1, 2, 0)).view(kv_heads, -1, n, rows)
    unseen = torch.arange(rows, device=starts.device) > starts[:, None]
    scores = scores + torch.zeros_like(unseen, dtype=scores.dtype).masked_fill_(unseen, float("-inf"))
    depth = len(own_keys)
    if depth:
        keys_here = torch.stack(list(own_keys)).permute(2, 0, 1, 3)[:, None]  # [kv, 1, depth, n, d]
        own = (grouped[:, :, None] * keys_here).sum(-1)  # [kv, group, depth, n]
        scores = torch.cat([scores, own.transpose(2, 3)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    on_rows, on_own = weights.split_with_sizes([rows, depth], dim=-1)
    mixed = torch.bmm(on_rows.reshape(kv_heads, -1, rows), values.transpose(0, 1)).view(kv_heads, -1, n, width)
    if depth:
        values_here = torch.stack(list(own_values)).permute(2, 0, 1, 3)[:, None]
        mixed = mixed + (on_own.transpose(2, 3)[..., None] * values_here).sum(2)
    return mixed.permute(2, 0, 1, 3).reshape(n, heads * width)


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
    """Projections only; how rows see each other is :mod:`dynaspec.train.heads.decoder`'s business."""

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
            given = AttentionInputs(batch, alive, queries, keys, values, own_keys, own_values)
            x = residual + attention.o_proj(attend(given))
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
