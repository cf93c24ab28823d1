"""The decoder on CUDA against the decoder on CPU, one family kind at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dynaspec.model.batch import BLOCK_SIZE, ForwardBatch
from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from support.checkpoints import FAMILIES, VOCAB, random_model, save

PROMPTS = (37, 5)
DRAFTED = 4


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_the_cpu(family: str, tmp_path: Path) -> None:
    save(random_model(*FAMILIES[family], seed=0), tmp_path)
    expected = logits(load_model(str(tmp_path), device="cpu"))
    found = logits(load_model(str(tmp_path), device="cuda", dtype="float32"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    save(random_model(*FAMILIES["llama"], seed=0), tmp_path)
    expected = logits(load_model(str(tmp_path), device="cpu"))
    found = logits(load_model(str(tmp_path), device="cuda", dtype="bfloat16"))
    assert (found - expected).norm() < 0.05 * expected.norm()


def logits(model: Model) -> torch.Tensor:
    """[rows, vocabulary], on the CPU: a prefill of two prompts, then a pass over drafted tokens of both."""
    rng = np.random.default_rng(0)
    need = -(-(max(PROMPTS) + DRAFTED) // BLOCK_SIZE)
    tables = np.arange(2 * need, dtype=np.int32).reshape(2, need)
    shapes = model.kv_shapes(2 * need)
    kv = [
        tuple(torch.full(shape, float("nan"), dtype=model.dtype, device=model.device) for shape in shapes)
        for _ in range(model.config.num_layers)
    ]
    passes = [((0, 0), PROMPTS), (PROMPTS, (DRAFTED, DRAFTED))]
    outputs = []
    for contexts, rows in passes:
        batch = _batch(contexts, rows, tables, rng, model.device)
        outputs.append(model.logits(model.forward(batch, kv)).cpu())  # type: ignore[arg-type]
    return torch.cat(outputs)


def _batch(
    contexts: tuple[int, ...], rows: tuple[int, ...], tables: np.ndarray, rng: np.random.Generator, device: torch.device
) -> ForwardBatch:
    sequence = np.repeat(np.arange(2), rows)
    positions = np.concatenate([np.arange(c, c + r) for c, r in zip(contexts, rows, strict=True)])
    slots = tables[sequence, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    tokens = torch.from_numpy(rng.integers(1, VOCAB, len(sequence))).to(device)
    start = np.array([0, *np.cumsum(rows)], dtype=np.int32)
    return ForwardBatch(tokens, positions, slots, start, np.array(contexts, dtype=np.int32), tables)
