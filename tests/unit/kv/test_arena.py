from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynaspec.contract.errors import CapacityError
from dynaspec.kv.blocks import Arena, blocks_within


@pytest.mark.parametrize(("memory", "needed", "blocks"), [(1000, 99, 10), (1099, 99, 10), (1000, 7, 7), (100, 9, 1)])
def test_blocks_within(memory: int, needed: int, blocks: int) -> None:
    assert blocks_within(memory, 100, needed) == blocks


def test_memory_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"99 bytes.*takes 100"):
        blocks_within(99, 100, 5)


def test_an_arena_has_zeroed_keys_and_values_for_every_layer() -> None:
    arena = Arena.allocate(2, ((3, 4), (3, 5)), torch.float16, torch.device("cpu"))
    assert [(tuple(k.shape), tuple(v.shape)) for k, v in arena.layers] == [((3, 4), (3, 5))] * 2
    assert {tensor.dtype for layer in arena.layers for tensor in layer} == {torch.float16}
    assert not any(tensor.any() for layer in arena.layers for tensor in layer)
    assert arena.layers[0][0].data_ptr() != arena.layers[1][0].data_ptr()


_MAPPED = """
import os, sys, torch
import dynaspec.kv.blocks as blocks
from dynaspec.model.taps import Taps

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

for touched in (128, 32):
    blocks._TOUCHED = touched << 20
    before = resident()
    arena = blocks.Arena.allocate(1, ((4096, 4096), (4096, 4096)), torch.float32, torch.device("cpu"))
    print((resident() - before) / 2**20)
    del arena
before = resident()
taps = Taps.allocate((0, 1), 16384, 2, 128, torch.float32, torch.device("cpu"))
print((resident() - before) / 2**20)
"""
"""How many MiB of an arena of 128 are mapped, where 128 and 32 of them are to be; and of states with 256, where 64
are."""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells what is mapped")
def test_the_blocks_handed_out_first_are_mapped_at_once_and_no_more_than_that() -> None:
    # A process of its own: one that has freed as much before gets memory that is mapped already.
    ran = subprocess.run([sys.executable, "-c", _MAPPED], capture_output=True, text=True, check=True)
    all_of_it, a_quarter, states = map(float, ran.stdout.split())
    assert all_of_it > 112
    assert 16 <= a_quarter < 80
    assert 48 <= states < 112


def test_more_than_the_machine_has_is_a_capacity_error() -> None:
    shape = (2**40, 2**20)
    with pytest.raises(CapacityError, match="kv_cache_memory"):
        Arena.allocate(1, (shape, shape), torch.float32, torch.device("cpu"))
