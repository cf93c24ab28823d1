"""A profile measured on vLLM: one engine, all lengths, read from its decision log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynaspec.bench.datasets import FittedPrompts
from dynaspec.bench.profile_hosts import LOG, on_vllm
from dynaspec.bench.profiling import Grid
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.explain.evidence import gather
from hosts.vllm.engines import MODELS

GRID = Grid((1, 2), (1, 3), 1)
TEXTS = ("The history of the city", "def main():\n    ", "Once upon a time there was a")


def test_profile(tmp_path: Path) -> None:
    def fit(tokenizer: Any, room: int) -> FittedPrompts:
        assert room > 0
        return FittedPrompts(tuple(tuple(tokenizer.encode(text)) for text in TEXTS), 0)

    found = on_vllm(
        str(MODELS / "target"),
        {"method": "draft_model", "model": str(MODELS / "draft")},
        GRID,
        SamplingParams(temperature=0.0, detokenize=False),
        {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 2, "enforce_eager": True},
        tmp_path,
        fit,
        lambda *told: None,
    )
    profile = found.profile(GRID)
    assert {size: list(row) for size, row in profile.batch_stats.items()} == {1: [0, 1, 3], 2: [0, 1, 3]}
    first, second, third = profile.acceptance_rate_per_pos
    assert 1 > first >= second >= third > 0
    signal = gather([tmp_path / LOG])
    assert (signal.backend, signal.longest) == ("vllm", 3)
    assert signal.model == str(MODELS / "target")
