from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.sampling import accelerator, ops
from unit.sampling.oracle import process_row


def on_cpu(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scores = torch.from_numpy(logits.astype(np.float32)[None].copy())
    ops.truncate(scores, np.zeros(1, np.int64), *columns(params))
    return scores[0].numpy()


def on_any_device(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scores = torch.from_numpy(logits.astype(np.float32)[None])
    return accelerator.truncate(scores, *(torch.from_numpy(c) for c in columns(params)))[0].numpy()


def columns(params: SamplingParams) -> tuple[np.ndarray, ...]:
    return (
        np.array([params.temperature], np.float32),
        np.array([params.min_p]),
        np.array([max(params.top_k, 0)]),
        np.array([params.top_p]),
    )


implementations = pytest.mark.parametrize("truncate", [on_cpu, on_any_device])


@implementations
@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        ([0.0, 0.0, 0.0, 0.0], SamplingParams(top_k=2), [0, 1]),
        ([0.0, 1.0, 0.0, 0.0], SamplingParams(top_k=2), [0, 1]),
        ([-1.0, -1.0, -1.0, 5.0], SamplingParams(top_k=3), [0, 1, 3]),
        ([0.0, 0.0, 0.0, 0.0], SamplingParams(top_p=0.5), [0, 1]),
        ([0.0, 0.0, 0.0, 0.0], SamplingParams(top_p=0.51), [0, 1, 2]),
        ([-0.0, 0.0, -0.0, 0.0], SamplingParams(top_k=2), [0, 1]),
        ([1.0, 1.0, 1.0, 1.0], SamplingParams(top_k=2, top_p=0.5), [0]),
        ([2.0, 2.0, 0.0, 0.0], SamplingParams(min_p=1.0), [0, 1]),
        ([-np.inf, 0.0, -np.inf, 0.0], SamplingParams(top_k=3), [1, 3]),
        ([-np.inf, 0.0, -np.inf, 0.0], SamplingParams(top_p=0.5), [1]),
        ([3.0, -3e38, 3.0, -np.inf], SamplingParams(top_p=0.999999), [0, 2]),
        ([1.0, 2.0, 3.0, 4.0], SamplingParams(top_k=1), [3]),
    ],
)
def test_ties_go_to_the_lower_id(
    truncate: object, logits: list[float], params: SamplingParams, kept: list[int]
) -> None:
    assert np.flatnonzero(np.isfinite(truncate(np.array(logits), params))).tolist() == kept


@implementations
@settings(max_examples=150)
@given(
    logits=st.lists(
        st.one_of(st.integers(-6, 6).map(lambda n: n / 4), st.floats(-40, 40, width=32)), min_size=2, max_size=40
    ),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.97, 0.83, 0.5003, 0.1]),
    min_p=st.sampled_from([0.0, 0.013, 0.31]),
    temperature=st.sampled_from([1.0, 0.6, 2.3]),
)
def test_truncation_agrees_with_sorting(
    truncate: object, logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    scores = truncate(np.array(logits), params)
    expected = np.array(process_row(np.float32(logits).tolist(), params), np.float32)
    if np.isfinite(scores).sum() != np.isfinite(expected).sum():
        assert _at_rounding(expected, scores, top_p)
    else:
        np.testing.assert_array_equal(scores, expected)


def _at_rounding(expected: np.ndarray, scores: np.ndarray, top_p: float) -> bool:
    """The two differ in one token whose mass before it equals top_p within rounding."""
    fewer, more = sorted((scores, expected), key=lambda row: np.isfinite(row).sum())
    if np.isfinite(more).sum() - np.isfinite(fewer).sum() != 1:
        return False
    mass = np.exp(fewer.astype(np.float64) - more.max()).sum() / np.exp(more.astype(np.float64) - more.max()).sum()
    return mass >= top_p - 1e-9


def test_large_vocabulary_agrees_with_torch() -> None:
    rng = np.random.default_rng(0)
    for scale in (0.1, 3.0, 12.0):
        for params in (SamplingParams(top_p=0.9), SamplingParams(top_k=50), SamplingParams(top_k=40, top_p=0.8)):
            logits = rng.normal(0, scale, 4099)
            np.testing.assert_array_equal(on_cpu(logits, params), on_any_device(logits, params))


def test_only_the_indexed_rows_change() -> None:
    scores = torch.randn(3, 8)
    before = scores.clone()
    ops.truncate(scores, np.array([1]), *columns(SamplingParams(top_k=1)))
    assert torch.equal(scores[[0, 2]], before[[0, 2]])
    assert torch.isfinite(scores[1]).sum() == 1
