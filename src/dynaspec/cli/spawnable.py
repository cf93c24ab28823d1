"""The console entry again, for commands that start vLLM's engine.

vLLM's processes import the program that started them. This one has nothing in it until it runs; the usual one brings
numba, beside which vLLM's workers fail on CPUs.
"""

from __future__ import annotations

import os
import sys

_NAME = "dynaspec.cli.spawnable"


def become_spawnable() -> None:
    """Starts the command again as this program, in the place of the process; returns where it is that already.

    Raises:
        ConfigError: vLLM is not installed.
    """
    from dynaspec.hosts.vllm.launch import require_vllm

    require_vllm()
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == _NAME:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", _NAME, *sys.argv[1:]])


def main() -> None:
    from dynaspec.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
