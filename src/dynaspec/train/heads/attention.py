"""How rows of a training batch see each other: the training-time test's mask.

At depth 0 all rows see each other causally. At depth j a chain that started at row i sees the depth-0 keys up to row i
and, of its own chain, the keys of depths 1 … j.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynaspec.train.heads.batch import Batch


def attend(
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
