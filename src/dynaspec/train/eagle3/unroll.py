"""The training-time test: a head drafts from every chain as it will at run time, several steps deep.

At depth 0 all rows have the target's own states and see each other causally. At depth j a chain that
started at row i stands at position i + j; it feeds on its own last output and sees the depth-0 keys up
to row i and, of its own chain, the keys of depths 1 … j.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dynaspec.train.eagle3.batch import Batch
from dynaspec.train.eagle3.head import Head, rotate


@dataclass(frozen=True, slots=True)
class Depth:
    """What came out at one depth: ``chains`` [n] int64, and ``normed`` [n, hidden], which lm_head reads."""

    chains: Tensor
    normed: Tensor


def unroll(head: Head, batch: Batch, depths: int, share: float = 1.0, seed: int = 0) -> Iterator[Depth]:
    """Outputs of depths 0 … ``depths`` − 1.

    Beyond depth 0 only a random ``share`` of the chains goes on, the same ones at every depth: deeper
    steps cost as much as the first and teach less.
    """
    layer = head.layer
    aux, everyone = (
        batch.aux.to(head.get_buffer("embedding").dtype),
        torch.arange(batch.chains, device=batch.aux.device),
    )
    fused = head.fc(aux)
    hidden = layer.hidden_norm(fused)
    both = _side_by_side(head, batch.next_tokens, hidden)
    cos, sin = head.get_buffer("cos"), head.get_buffer("sin")
    heads = _Heads(head)
    keys = rotate(heads.keys(both), cos[batch.positions], sin[batch.positions])
    lengths = [end - begin for begin, end in batch.row_spans]
    by_conversation = keys.split_with_sizes(lengths), heads.values(both).split_with_sizes(lengths)

    rows = batch.chain_rows
    residual = (hidden if head.shape.norm_before_residual else fused)[rows]
    read = both[rows]
    alive, going = everyone, _sample(batch.chains, share, seed, everyone.device)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for depth in range(depths):
        at = batch.positions[rows[alive]] + depth
        queries = rotate(heads.queries(read), cos[at], sin[at])
        if depth:
            own_keys.append(rotate(heads.keys(read), cos[at], sin[at]))
            own_values.append(heads.values(read))
        mixed = _attend(batch, alive, queries, *by_conversation, own_keys, own_values)
        x = residual + layer.self_attn.o_proj(mixed)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        yield Depth(alive, head.norm(x))

        if depth + 1 == depths:
            return
        stay = batch.room[alive] > depth
        if depth == 0:
            stay &= going
        if not bool(stay.any()):
            return
        alive, x = alive[stay], x[stay]
        own_keys = [k[stay] for k in own_keys]
        own_values = [v[stay] for v in own_values]
        hidden = layer.hidden_norm(x)
        read = _side_by_side(head, batch.next_tokens[rows[alive] + depth + 1], hidden)
        residual = hidden if head.shape.norm_before_residual else x


class _Heads:
    """Projections of [rows, 2 · hidden] to [rows, heads, head_dim]."""

    def __init__(self, head: Head) -> None:
        self._attention, self._width = head.layer.self_attn, head.shape.head_dim

    def queries(self, x: Tensor) -> Tensor:
        return self._split(self._attention.q_proj(x))

    def keys(self, x: Tensor) -> Tensor:
        return self._split(self._attention.k_proj(x))

    def values(self, x: Tensor) -> Tensor:
        return self._split(self._attention.v_proj(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self._width)


def _side_by_side(head: Head, tokens: Tensor, hidden: Tensor) -> Tensor:
    embedded = F.embedding(tokens, head.get_buffer("embedding"))
    return torch.cat([head.layer.input_layernorm(embedded).to(embedded.dtype), hidden.to(embedded.dtype)], dim=-1)


def _sample(count: int, share: float, seed: int, device: torch.device) -> Tensor:
    """[count] bool, ``share`` of them true."""
    if share >= 1.0:
        return torch.ones(count, dtype=torch.bool, device=device)
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator) < share).to(device)


def _attend(
    batch: Batch,
    alive: Tensor,
    queries: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> Tensor:
    """[alive, heads · head_dim]: every conversation by itself, as they differ in length.

    ``keys`` and ``values`` come by conversation, [rows, kv_heads, head_dim] each; the rest by chain.
    """
    edges = torch.tensor([end for _, end in batch.chain_spans], device=alive.device)
    counts = torch.searchsorted(alive, edges).diff(prepend=edges.new_zeros(1)).tolist()
    # Splits are undone by one concatenation in the backward pass; slices each by a tensor of zeros.
    starts, by_query = batch.chain_rows[alive].split_with_sizes(counts), queries.split_with_sizes(counts)
    by_key, by_value = [k.split_with_sizes(counts) for k in own_keys], [v.split_with_sizes(counts) for v in own_values]
    mixed = []
    for c, count in enumerate(counts):
        if count:
            first = batch.row_spans[c][0]
            mine, theirs = [k[c] for k in by_key], [v[c] for v in by_value]
            mixed.append(_attend_one(by_query[c], keys[c], values[c], mine, theirs, starts[c] - first))
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
