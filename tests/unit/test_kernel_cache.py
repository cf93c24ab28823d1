from __future__ import annotations

from pathlib import Path

import dynaspec
from dynaspec.kernel_cache import drop_outdated


def kept(package: Path) -> list[str]:
    return sorted(path.name for path in package.rglob("*") if path.suffix in (".nbi", ".nbc", ".pyc"))


def test_only_what_another_version_has_compiled_is_dropped(tmp_path: Path) -> None:
    cache = tmp_path / "model" / "__pycache__"
    cache.mkdir(parents=True)
    for name in ("a.f-1.nbi", "a.f-1.1.nbc", "a.pyc"):
        (cache / name).touch()
    drop_outdated(tmp_path, "1.0")
    assert kept(tmp_path) == ["a.pyc"]
    (cache / "a.f-1.nbi").touch()
    drop_outdated(tmp_path, "1.0")
    assert kept(tmp_path) == ["a.f-1.nbi", "a.pyc"]
    drop_outdated(tmp_path, "1.1")
    assert kept(tmp_path) == ["a.pyc"]


def test_a_folder_that_cannot_be_written_to_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "__pycache__").touch()  # no folder, so nothing can be put into it
    drop_outdated(tmp_path, "1.0")


def test_importing_the_package_has_done_so() -> None:
    stamp = Path(dynaspec.__file__).parent / "__pycache__" / "compiled-by"
    assert stamp.read_text(encoding="utf-8") == dynaspec.__version__
