"""Which OpenMP runtime compiled code runs on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROBE = """
import ctypes, sys
import torch
other = ctypes.CDLL(sys.argv[1])
from dynaspec.model.kernels import team
address = lambda library: ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
runtime = team._runtime()
print(runtime is not None and address(runtime) == address(ctypes.CDLL(sys.argv[2])) != address(other))
"""


def test_the_runtime_is_pytorch_s_own_and_no_other_copy(tmp_path: Path) -> None:
    """With two runtimes in turn each waits for the other's threads to stop spinning: a step took twice as long."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if not bundled:
        pytest.skip("PyTorch here brings no GNU OpenMP of its own")
    copy = tmp_path / "libgomp-copy.so"  # under a name of its own, as wheels carry it
    copy.write_bytes(bundled[0].read_bytes().replace(b"libgomp.so.1\0", b"libgomp.so.9\0"))
    found = subprocess.run(
        [sys.executable, "-c", PROBE, copy, bundled[0]], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "True"
