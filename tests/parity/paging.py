"""A paged KV cache for tests: scattered blocks, and NaN wherever nothing was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.model.taps import Taps

from .checkpoints import TEXTS


class PagedTexts:
    """Runs a model over several growing texts."""

    def __init__(self, model: Model, texts: int, max_len: int, seed: int = 0) -> None:
        per_text = -(-max_len // BLOCK_SIZE)
        order = np.random.default_rng(seed).permutation(texts * per_text).astype(np.int32)
        self.model = model
        self.tables = order.reshape(texts, per_text)
        self.lengths = np.zeros(texts, np.int32)
        self.kv = [
            tuple(torch.full(shape, torch.nan, dtype=model.dtype) for shape in model.kv_shapes(len(order)))
            for _ in range(model.config.num_layers)
        ]

    def batch(self, chunks: Mapping[int, Sequence[int]]) -> ForwardBatch:
        """The pass that appends a chunk of tokens to some texts."""
        texts = list(chunks)
        positions = [self.lengths[text] + np.arange(len(chunks[text])) for text in texts]
        slots = [
            self.tables[text, at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
            for text, at in zip(texts, positions, strict=True)
        ]
        counts = [len(chunks[text]) for text in texts]
        return ForwardBatch(
            tokens=torch.tensor([token for text in texts for token in chunks[text]]),
            positions=np.concatenate(positions).astype(np.int64),
            slots=np.concatenate(slots),
            query_start=np.cumsum([0, *counts], dtype=np.int32),
            context_lens=self.lengths[texts].copy(),
            block_tables=self.tables[texts].copy(),
        )

    def append(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """One pass; logits [tokens, vocabulary] for each text of ``chunks``."""
        logits = self.model.logits(self.model.forward(self.batch(chunks), self.kv))
        for text, tokens in chunks.items():
            self.lengths[text] += len(tokens)
        return dict(zip(chunks, logits.split([len(tokens) for tokens in chunks.values()]), strict=True))


def in_passes(
    model: Model, texts: Sequence[Sequence[int]], passes: Sequence[Sequence[int]], seed: int = 0
) -> list[torch.Tensor]:
    """Logits of all texts; pass i appends ``passes[i][t]`` tokens to text t."""
    paged = PagedTexts(model, len(texts), max(map(len, texts)), seed)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for counts in passes:
        starts = paged.lengths.tolist()
        chunks = {t: texts[t][starts[t] : starts[t] + count] for t, count in enumerate(counts)}
        chunks = {t: chunk for t, chunk in chunks.items() if chunk}
        if not chunks:
            break
        for t, logits in paged.append(chunks).items():
            found[t].append(logits)
    return [torch.cat(parts) for parts in found]


def all_states(paged: PagedTexts) -> torch.Tensor:
    """[layers + 2, tokens, hidden] of a pass over the first text of ``TEXTS``, as ``model.taps`` numbers them."""
    config = paged.model.config
    text = TEXTS[0]
    states, width = range(config.num_layers + 2), config.hidden_size
    taps = Taps.allocate(states, paged.tables.size, config.num_layers, width, paged.model.dtype, torch.device("cpu"))
    batch = paged.batch({0: text})
    paged.model.forward(batch, paged.kv, taps)
    kept = taps.arena[torch.from_numpy(batch.slots)].view(len(text), len(states), width)
    return kept.transpose(0, 1)
