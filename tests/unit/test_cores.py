"""Cores that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaspec.cores import usable_cores

HALF = "50000 100000\n"
ONE = "100000 100000\n"
NO_LIMIT = "max 100000\n"


def cores_with(files: dict[str, str], own: str, folder: Path) -> int:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "own").write_text(own)
    return usable_cores(folder, folder / "own")


@pytest.fixture
def everything(tmp_path: Path) -> int:
    """Cores without any limit."""
    return usable_cores(tmp_path / "nothing", tmp_path / "nothing")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": NO_LIMIT}, None),
        ({"cpu.max": ONE}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "170000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_containers_time_counts_as_cores(
    files: dict[str, str], cores: int | None, tmp_path: Path, everything: int
) -> None:
    assert cores_with(files, "0::/\n", tmp_path) == (everything if cores is None else min(cores, everything))


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ({"a.slice/b.service/cpu.max": ONE}, "0::/a.slice/b.service\n"),
        ({"a.slice/b.service/cpu.max": NO_LIMIT, "a.slice/cpu.max": HALF}, "0::/a.slice/b.service\n"),
        (
            {"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            "2:cpu,cpuacct:/x\n1:pids:/\n0::/\n",
        ),
        # A container whose path is that of the machine, and which sees its own group as the root.
        ({"cpu.max": ONE}, "0::/docker/abc\n"),
    ],
    ids=["own", "around", "version 1", "container"],
)
def test_the_least_of_a_process_groups_counts(files: dict[str, str], own: str, tmp_path: Path, everything: int) -> None:
    assert cores_with(files, own, tmp_path) == 1


def test_other_groups_do_not_count(tmp_path: Path, everything: int) -> None:
    assert cores_with({"a/cpu.max": ONE, "pids/x/cpu.max": ONE}, "7:pids:/x\n0::/b\n", tmp_path) == everything


def test_without_a_file_of_groups_the_root_counts(tmp_path: Path, everything: int) -> None:
    (tmp_path / "cpu.max").write_text(ONE)
    assert usable_cores(tmp_path, tmp_path / "nothing") == 1
