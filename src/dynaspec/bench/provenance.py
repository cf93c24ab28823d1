"""What a figure was measured with: versions, machine, threads, revision; whether its products are row-invariant."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dynaspec.cores import usable_cores
from dynaspec.model.linear import LinearFactory, row_invariant

SHAPES = ((512, 512), (768, 512), (2816, 512), (512, 1408), (4096, 512), (576, 192), (4096, 192))
"""[out, in] of a small target's and a small drafter's layers."""
PACKAGES = ("dynaspec", "torch", "transformers", "tokenizers", "safetensors", "numpy", "numba")
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile")
"""Instruction sets that the kernels gain from."""
_PREFIXES = ("DYNASPEC_", "VLLM_SPEC_", "OMP_", "MKL_", "KMP_", "NUMBA_", "CUDA_VISIBLE", "TORCH_", "HF_HUB_OFFLINE")


def check_invariance() -> dict[str, bool]:
    """Tries the CPU's linear layers, by shape; False: exactness would hold only up to rounding."""
    make = LinearFactory(torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(0)
    results = {}
    for rows, columns in SHAPES:
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        results[f"{rows}x{columns}"] = row_invariant(make(weight), columns)
    return results


def provenance() -> dict[str, Any]:
    """Everything that a reader of a result needs to repeat it, as plain JSON values."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "threads": threads(),
        "git": git_revision(),
        "environment": environment(os.environ),
    }


def versions() -> dict[str, str]:
    """Python's and those of the packages that decide results or speed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def machine() -> dict[str, Any]:
    """The processor and, where there are any, the GPUs."""
    fields = _cpu_fields()
    present = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "system": platform.platform(),
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in present],
        "mkl": torch.backends.mkl.is_available(),  # type: ignore[no-untyped-call]
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def threads() -> dict[str, int]:
    return {"torch": torch.get_num_threads(), "usable_cpus": usable_cores()}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that change what dynaspec does or how fast."""
    return {name: value for name, value in sorted(variables.items()) if name.startswith(_PREFIXES)}


def git_revision() -> dict[str, Any] | None:
    """The commit of the source tree the package runs from, and whether it has been changed since; None elsewhere."""
    folder = Path(__file__).parent
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision, "modified": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_fields() -> dict[str, str]:
    """The first processor's entry of Linux's /proc/cpuinfo; empty on other systems."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
