"""The unit: what it starts, when it starts it again, what it forbids."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from dynaspec.cli.main import BAD_INPUT
from unit.deploy.serve_command import DEPLOY, parsed
from unit.deploy.stopping import needed_to_stop_s

UNIT = DEPLOY / "systemd/dynaspec.service"


def settings() -> dict[str, list[str]]:
    found = defaultdict(list)
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


def only(name: str) -> str:
    [value] = settings()[name]
    return value


def test_it_starts_the_server() -> None:
    program, command, *options = only("ExecStart").split()
    assert (Path(program).name, command) == ("dynaspec", "serve")
    assert str(parsed(options)["config"]) == "/etc/dynaspec/serve.yaml"
    assert only("EnvironmentFile").startswith("-")  # there need be no key


def test_it_starts_again_what_may_work_then() -> None:
    assert only("Restart") == "on-failure"
    assert only("RestartPreventExitStatus") == str(BAD_INPUT)


def test_the_server_has_time_to_end() -> None:
    assert only("KillSignal") == "SIGTERM"
    assert int(only("TimeoutStopSec")) >= needed_to_stop_s()


def test_it_is_confined() -> None:
    given = settings()
    for name in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "ProtectHome", "RestrictSUIDSGID", "DynamicUser"):
        assert given[name] == ["yes"]
    assert given["ProtectSystem"] == ["strict"]
    assert given["CapabilityBoundingSet"] == [""]
    assert "MemoryDenyWriteExecute" not in given  # kernels are compiled


def test_all_that_is_written_goes_to_its_cache() -> None:
    caches = [
        pair.partition("=")[2] for pair in settings()["Environment"] if pair.split("=")[0].endswith(("_DIR", "_HOME"))
    ]
    assert len(caches) == 3
    assert all(path.startswith(f"%C/{only('CacheDirectory')}/") for path in caches)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_it(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(only("ExecStart").split()[0], "/bin/true"))
    ended = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
