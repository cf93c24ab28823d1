"""Passes of a head and of its target over whole texts, without an engine."""

from __future__ import annotations

import numpy as np
import torch

from dynaspec.kv.blocks import Arena
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.model.decoder_heads.head import Head
from dynaspec.model.taps import Taps


def states_of(model: Model, text: list[int], states: tuple[int, ...]) -> torch.Tensor:
    """[tokens, states · width]"""
    blocks = -(-len(text) // BLOCK_SIZE)
    kv = Arena.allocate(model.config.num_layers, model.kv_shapes(blocks), torch.float32, torch.device("cpu")).layers
    width = model.config.hidden_size
    taps = Taps.allocate(states, blocks, model.config.num_layers, width, torch.float32, torch.device("cpu"))
    model.forward(rows(text, 0, blocks), kv, taps)
    return taps.arena[: len(text)]


def rows(tokens: list[int], start: int, blocks: int) -> ForwardBatch:
    """Tokens of one request from position ``start`` on."""
    at = np.arange(start, start + len(tokens), dtype=np.int64)
    return ForwardBatch(
        tokens=torch.tensor(tokens),
        positions=at,
        slots=at.copy(),
        query_start=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([start], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
    )


def logits_of(head: Head, states: torch.Tensor, text: list[int], chain: list[int], chunk: int) -> torch.Tensor:
    """[rows, draft vocabulary] of the text from its second token on, in chunks, then of the chain token by token."""
    blocks = -(-(len(text) + len(chain)) // BLOCK_SIZE)
    kv = Arena.allocate(head.config.num_layers, head.kv_shapes(blocks), torch.float32, torch.device("cpu")).layers
    for key, value in kv:
        key.fill_(torch.nan)
        value.fill_(torch.nan)
    found, hidden = [], torch.empty(0)
    for start in range(1, len(text), chunk):
        part = text[start : start + chunk]
        known = states[start - 1 : start - 1 + len(part)].clone()
        hidden = head.forward(rows(part, start, blocks), head.fuse(known), kv)
        found.append(head.logits(hidden))
    for i, token in enumerate(chain):
        hidden = head.forward(rows([token], len(text) + i, blocks), hidden[-1:], kv)
        found.append(head.logits(hidden))
    return torch.cat(found)
