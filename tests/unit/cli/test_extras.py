"""Commands whose extra is not installed say what to install; the others need none."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dynaspec.cli.main import EXTRAS

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
from dynaspec.cli.main import main
main()
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, ",".join(EXTRAS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["chat", "generate", "serve", "simulate"])
def test_the_core_is_enough_for_help(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr


def test_a_command_says_which_extra_it_needs(tmp_path: Path) -> None:
    done = run("serve", str(tmp_path))
    assert done.returncode == 2
    assert "which is not installed" in done.stderr
    assert "dynaspec[serve]" in "".join(done.stderr.split())


def test_every_such_module_is_in_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        wanted = "fastapi" if module == "starlette" else module  # comes with it
        assert any(requirement.startswith(wanted) for requirement in extras[extra])
