"""vLLM's own OpenAI server: its flags read, and the process handed over to it. Needs vLLM.

The server is this module run as a program, not a call from the command line, because processes that it spawns import
its program again: in vLLM's workers there is then no more than ``vllm serve`` brings. On CPUs they fail beside numba.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.entrypoints.cli.serve import cmd_init
from vllm.logger import configure_logging_from_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynaspec.contract.errors import ConfigError

_NAME = "serve"
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_ARGUMENTS = "DYNASPEC_VLLM_ARGUMENTS"
"""Environment variable with the server's arguments as JSON: other users could read a process's own, keys among them."""


def become_server(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the server; it serves until a signal.

    Args:
        arguments: as after ``vllm serve``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    program = [sys.executable, "-m", "dynaspec.hosts.vllm.serve"]
    os.execve(program[0], program, {**os.environ, _ARGUMENTS: json.dumps(list(arguments))})


def main() -> None:
    """Serves what ``become_server`` was given."""
    server = VllmServer()
    server.run(server.parse(json.loads(os.environ.pop(_ARGUMENTS))))


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # not known where vLLM is not installed
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; expected flags of 'dynaspec serve' or 'vllm serve'")


class VllmServer:
    """What ``vllm serve`` does, without the command, whose package metadata some builds miss."""

    def __init__(self) -> None:
        # As vLLM's command does: forked workers would inherit a runtime that they cannot use.
        os.environ.setdefault(_START_METHOD, "spawn")
        self._parser: Any = _Parser(prog="dynaspec")
        self._command = next(command for command in cmd_init() if command.name == _NAME)
        self._command.subparser_init(self._parser.add_subparsers(dest="subparser"))

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """
        Args:
            arguments: as after ``vllm serve``.

        Raises:
            ConfigError: vLLM does not take them.
        """
        try:
            parsed: Namespace = self._parser.parse_args([_NAME, *arguments])
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:
            raise ConfigError(f"vLLM refuses its flags: {_line(error)}") from None
        return parsed

    def check(self, arguments: Namespace) -> None:
        """
        Raises:
            ConfigError: arguments that do not go together.
        """
        try:
            self._command.validate(arguments)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise ConfigError(f"vLLM refuses its flags: {_line(error)}") from None

    def run(self, arguments: Namespace) -> None:
        """Serves until a signal; for a process's main thread."""
        configure_logging_from_args(arguments)
        self._command.cmd(arguments)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
