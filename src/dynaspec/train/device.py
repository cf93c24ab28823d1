"""Where to compute."""

from __future__ import annotations

import torch

from dynaspec.contract.errors import ConfigError


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA if there is a device, else the CPU.

    Raises:
        ConfigError: the name is unknown, or CUDA was asked for and is missing.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device: got {name!r}, expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: got 'cuda', but no CUDA device is available; expected auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        torch.set_flush_denormal(True)  # tiny momenta would otherwise take the slow path
    return torch.device(name)
