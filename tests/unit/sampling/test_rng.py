from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from dynaspec.compiled import kernel
from dynaspec.sampling import accelerator, cpu
from dynaspec.sampling.cpu import exponential
from dynaspec.sampling.rng import GOLDEN, Purpose, UInt64, nth, request_key, row_keys, uniforms


@kernel
def hashes(keys: UInt64, count: int) -> UInt64:
    """The first ``count`` numbers of each stream, [R, count]."""
    out = np.empty((keys.size, count), np.uint64)
    for r in range(keys.size):
        for i in range(count):
            out[r, i] = nth(keys[r], i)
    return out


@kernel
def exponentials(keys: UInt64, count: int) -> cpu.Float64:
    """Exponential noise [R, count] of the streams ``keys`` [R], as ``cpu.race`` uses it."""
    out = np.empty((keys.size, count), np.float64)
    for r in range(keys.size):
        for i in range(count):
            out[r, i] = exponential(nth(keys[r], i))
    return out


def keys_of(seed: int, n_index: int, position: int, purpose: Purpose, depth: int = 0) -> int:
    columns = ([position - depth], [depth], [purpose])
    request = np.array([request_key(seed, n_index)], np.uint64)
    return int(row_keys(request, *(np.array(column, np.int64) for column in columns))[0])


def test_numbers_are_those_of_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert hashes(np.zeros(1, np.uint64), 3)[0].tolist() == published


def test_the_host_and_the_kernels_mix_alike() -> None:
    for seed in (0, 1, -5, 2**63 - 1):
        inner = int(hashes(np.array([(seed - GOLDEN) % 2**64], np.uint64), 1)[0, 0])
        assert request_key(seed, 2) == int(hashes(np.array([inner], np.uint64), 3)[0, 2])


def test_torch_gives_the_same_integers() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 7, np.uint64)
    ours = accelerator.hashes(torch.from_numpy(keys.view(np.int64)), 500).numpy().view(np.uint64)
    np.testing.assert_array_equal(ours, hashes(keys, 500))


def test_keys_of_different_seeds_continuations_positions_and_purposes_differ() -> None:
    grid = itertools.product(range(-3, 4), range(4), range(50), Purpose)
    keys = [keys_of(*point) for point in grid]
    assert len(set(keys)) == len(keys) == 7 * 4 * 50 * len(Purpose)


def test_only_the_target_stream_ignores_how_many_tokens_were_drafted() -> None:
    for purpose in Purpose:
        same = keys_of(1, 0, 9, purpose, depth=0) == keys_of(1, 0, 9, purpose, depth=4)
        assert same == (purpose is Purpose.TARGET)


@pytest.mark.parametrize("shift", [1, 2, 17])
def test_neighbouring_positions_are_uncorrelated(shift: int) -> None:
    position = np.arange(20_000)
    request = np.full(position.size, request_key(3, 0), np.uint64)
    u = uniforms(row_keys(request, position, np.zeros_like(position), np.full_like(position, Purpose.ACCEPT)))
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(u[shift:], u[:-shift])[0, 1]) < 4 / np.sqrt(u.size)


def test_uniforms_never_reach_an_end() -> None:
    # Keys whose first number has all bits clear, or all bits set: SplitMix64 is a bijection and can be undone.
    for extreme in (0, 2**64 - 1):
        key = np.array([(_unmix(extreme) - GOLDEN) % 2**64], np.uint64)
        assert int(hashes(key, 1)[0, 0]) == extreme
        assert 0.0 < uniforms(key)[0] < 1.0
        for noise in (
            accelerator.exponentials(torch.from_numpy(key.view(np.int64)), 1)[0, 0],
            exponentials(key, 1)[0, 0],
        ):
            assert 0.0 < float(noise) < 40.0


def test_noise_is_exponential_and_the_same_on_all_devices() -> None:
    keys = hashes(np.zeros(1, np.uint64), 20)[0]
    noise = exponentials(keys, 1000)
    assert stats.kstest(noise.ravel(), "expon").pvalue > 1e-3
    other = accelerator.exponentials(torch.from_numpy(keys.view(np.int64)), 1000).numpy()
    np.testing.assert_allclose(noise, other, rtol=1e-14)


def _unmix(value: int) -> int:
    mask = 2**64 - 1
    value ^= (value >> 31) ^ (value >> 62)
    value = value * pow(0x94D049BB133111EB, -1, 2**64) & mask
    value ^= (value >> 27) ^ (value >> 54)
    value = value * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    return value ^ (value >> 30) ^ (value >> 60)
