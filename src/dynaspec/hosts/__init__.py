"""Other engines that dynaspec's controllers drive: one package a host."""

from dynaspec.contract.errors import ConfigError

BACKENDS = ("dynaspec", "vllm", "transformers")
"""Engines that commands may name: dynaspec's own, and the hosts."""


def check_backend(backend: str) -> None:
    """
    Raises:
        ConfigError: it is not known.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--backend is {backend!r}; expected dynaspec, vllm or transformers")
