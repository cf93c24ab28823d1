"""Every import of ``dynaspec`` in the README and the docs works; nothing else of their Python is run."""

from __future__ import annotations

import re

import pytest

from unit.deploy.test_command_lines import PAGES

IMPORT = re.compile(r"^ *((?:from dynaspec[\w.]* import (?:\([^)]*\)|.+)|import dynaspec[\w.]*.*))$", re.MULTILINE)
LINES = sorted({(page.name, line) for page in PAGES for line in IMPORT.findall(page.read_text())})


@pytest.mark.parametrize(("page", "line"), LINES)
def test_an_import_works(page: str, line: str) -> None:
    exec(line, {})


def test_there_are_imports() -> None:
    assert len(LINES) > 10
