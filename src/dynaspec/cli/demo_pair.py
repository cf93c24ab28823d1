"""Where the demonstration's pair of models is."""

from __future__ import annotations

from pathlib import Path

import dynaspec
from dynaspec.contract.errors import ConfigError

DEMO_NAME = "demo"
"""What servers call the target."""


def demo_folder() -> Path:
    """The folder with ``target`` and ``draft``.

    Raises:
        ConfigError: they are not there.
    """
    candidates = (Path("tests/models"), Path(dynaspec.__file__).parents[2] / "tests" / "models")
    for folder in candidates:
        if all((folder / name / "config.json").is_file() for name in ("target", "draft")):
            return folder
    raise ConfigError(
        "the demonstration's models are not here; expected the folders tests/models/target and tests/models/draft in the working "
        "directory or in the project's own folder"
    )
