"""Where ``generate`` takes its prompts from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dynaspec.contract.errors import ConfigError

STDIN = "-"


def collect_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of the arguments (``-`` is what stdin holds), then of the file; stdin alone if it is piped.

    Raises:
        ConfigError: no prompt at all, or a file that cannot be read.
    """
    if not arguments and file is None:
        if sys.stdin.isatty():
            raise ConfigError("no prompt was given; expected prompts as arguments, --prompt-file, or text on stdin")
        arguments = [STDIN]
    if list(arguments).count(STDIN) > 1:
        raise ConfigError("'-' is given more than once; expected it once, as stdin can be read once")
    prompts = [_stdin() if argument == STDIN else argument for argument in arguments]
    return prompts + (_file(file) if file is not None else [])


def _stdin() -> str:
    """All of stdin as one prompt, without the newline that ends a piped line."""
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("stdin is empty; expected a prompt")
    return text


def _file(path: Path) -> list[str]:
    from dynaspec.bench.datasets import load_prompts

    return [prompt.text for prompt in load_prompts(path)]
