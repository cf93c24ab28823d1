"""Every Python file that docs, docstrings and comments name is there."""

from __future__ import annotations

import re

import pytest

from unit.deploy.serve_command import ROOT
from unit.deploy.test_command_lines import PAGES

FOLDERS = ("src/dynaspec", "tests", "benchmarks", "deploy")
FILES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
PATHS = {f"/{file.relative_to(ROOT).as_posix()}" for file in FILES}
NAME = re.compile(r"`([\w/-]+\.py)`")
NAMED = sorted(
    {(page.relative_to(ROOT).as_posix(), name) for page in [*PAGES, *FILES] for name in NAME.findall(page.read_text())}
)


@pytest.mark.parametrize(("page", "name"), NAMED)
def test_a_named_file_is_there(page: str, name: str) -> None:
    """A page may leave out the folders above that it stands in or has just named."""
    assert any(path.endswith(f"/{name}") for path in PATHS)


def test_there_are_such_names() -> None:
    assert len(NAMED) > 100
