"""Passes of a real model on CPU by the dtype of products and the form of weights: decoding, verification and prefill.

Each variant has the same text to read; they take turns. Prints milliseconds of a pass, logits included (of the last row
alone where a prompt is read), how many times as fast as the first variant each is, and how passes of each compare.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dynaspec.cli.demo import demo_target
from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "auto"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "auto", "quantization": "int8"},
    "int4": {"dtype": "auto", "quantization": "int4"},
}
"""What ``load_model`` is asked for; ``auto`` keeps bfloat16 weights and multiplies in float32."""
CASES = (
    *(("1 token", 1, 1, 256), ("8 tokens of one request", 1, 8, 256), ("16 tokens of one request", 1, 16, 256)),
    *(("8 requests", 8, 1, 256), ("16 requests", 16, 1, 256), ("32 requests", 32, 1, 256)),
    *(("4 tokens of 32 requests", 32, 4, 256), ("prefill of 128 tokens", 1, 128, 0), ("prefill of 512", 1, 512, 0)),
    *(("512 tokens at 7,488", 1, 512, 7488), ("1 token at 8,000", 1, 1, 8000)),
)
"""Requests, their tokens in the pass, and tokens before."""
BLOCKS = 640


def batch_of(requests: int, tokens: int, context: int, vocabulary: int) -> ForwardBatch:
    each = -(-(context + tokens) // BLOCK_SIZE)
    tables = np.arange(requests * each, dtype=np.int32).reshape(requests, each)
    positions = np.arange(context, context + tokens)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return ForwardBatch(
        tokens=torch.randint(vocabulary, (requests * tokens,), generator=torch.Generator().manual_seed(0)),
        positions=np.tile(positions, requests),
        slots=slots.reshape(-1),
        query_start=np.arange(0, requests * tokens + 1, tokens, dtype=np.int32),
        context_lens=np.full(requests, context, np.int32),
        block_tables=tables,
    )


def seconds(model: Model, batch: ForwardBatch, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    started = time.perf_counter()
    hidden = model.forward(batch, kv)
    model.logits(hidden[-1:] if len(batch.query_start) == 2 and len(hidden) > 16 else hidden)
    return time.perf_counter() - started


def ratios(ms: Mapping[str, float]) -> dict[str, float]:
    """Of passes of one variant. A chunk's time grows evenly with what is before it, so a prompt of 8,000 takes the mean
    of its first and last chunk for each."""
    first, last = ms["prefill of 512"], ms["512 tokens at 7,488"]
    return {
        "8 tokens of one request / 1 token": ms["8 tokens of one request"] / ms["1 token"],
        "16 requests / 1 token": ms["16 requests"] / ms["1 token"],
        "1 token at 8,000 / at 256": ms["1 token at 8,000"] / ms["1 token"],
        "rate of a prompt of 8,000 / of 512": first / ((first + last) / 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint (the demonstration's)")
    parser.add_argument("--turns", type=int, default=9, help="turns of each variant (9)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="those compared (all)")
    parser.add_argument("--kv-cache-dtype", choices=("float32", "bfloat16"), default="float32", help="of all (float32)")
    options = parser.parse_args()
    path = options.model or demo_target()
    models = {name: load_model(path, **VARIANTS[name]) for name in options.variants}
    title = f"{path.rpartition('/')[2]}, {torch.get_num_threads()} threads, KV cache in {options.kv_cache_dtype}"
    table = Table(title=f"{title}, milliseconds of a pass")
    for heading in ("pass", *models, *(f"{name} times" for name in list(models)[1:])):
        table.add_column(heading, justify="left" if heading == "pass" else "right")
    first = next(iter(models.values()))
    shapes = first.kv_shapes(BLOCKS)
    # Not zeros: those need no memory until they are written.
    kept = getattr(torch, options.kv_cache_dtype)
    kv = [(torch.randn(shapes[0]).to(kept), torch.randn(shapes[1]).to(kept)) for _ in range(first.config.num_layers)]
    medians: dict[str, dict[str, float]] = {name: {} for name in models}
    for name, requests, tokens, context in CASES:
        batch = batch_of(requests, tokens, context, first.config.vocab_size)
        turns = [[seconds(model, batch, kv) for model in models.values()] for _ in range(options.turns + 1)][1:]
        found = [median(column) for column in zip(*turns, strict=True)]
        for variant, one in zip(models, found, strict=True):
            medians[variant][name] = one
        times = (f"{found[0] / one:.2f}" for one in found[1:])
        table.add_row(name, *(f"{one * 1e3:.1f}" for one in found), *times)
    comparison = Table("passes", *models, title="Passes of one variant")
    by_variant = [ratios(ms) for ms in medians.values()]
    for name in by_variant[0]:
        comparison.add_row(name, *(f"{found[name]:.2f}" for found in by_variant))
    Console().print(table, comparison)


if __name__ == "__main__":
    main()
