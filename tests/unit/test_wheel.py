"""What is in the wheel, and that it works outside the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy of the sources, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=left_out)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [found] = folder.glob("dynaspec-*.whl")
    return found


def test_the_wheel_has_the_demonstration_and_the_page_but_no_studies_and_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "dynaspec/heads/smollm2-eagle3/model.safetensors" in names
    assert any(name.startswith("dynaspec/server/dashboard/static/") for name in names)
    assert "dynaspec/py.typed" in names
    assert {name.split("/")[0] for name in names if name.endswith(".py")} == {"dynaspec"}


def test_its_command_line_starts_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """The package alone is unpacked: what it requires is this environment's."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = "import dynaspec; print(dynaspec.__file__); from dynaspec.cli.main import main; main()"
    command = [sys.executable, "-c", script, "serve", "--help"]
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "dynaspec") in done.stdout
    assert "--demo" in done.stdout
