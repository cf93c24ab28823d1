"""``make audit`` fails for a known vulnerability alone, and never says that all is well where nothing was checked."""

from __future__ import annotations

import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest
import requests

from unit.deploy.serve_command import DEPLOY, ROOT


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = spec_from_file_location("audit", DEPLOY / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(name: str, *vulnerabilities: str, fixed: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "name": name,
        "version": "1.0",
        "vulns": [{"id": one, "fix_versions": list(fixed)} for one in vulnerabilities],
    }


SKIPPED = {"name": "unheard-of", "skip_reason": "not found"}


def test_a_vulnerability_is_a_failure(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report([package("good"), package("bad", "CVE-1", fixed=("1.1",)), package("worse", "CVE-2")]) == 1
    said = capsys.readouterr().out
    assert "bad 1.0: CVE-1, fixed in 1.1" in said
    assert "worse 1.0: CVE-2, fixed in no version yet" in said
    assert "3 packages checked, 2 known vulnerabilities" in said


def test_packages_that_were_not_checked_are_named(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report([package("good"), SKIPPED]) == 0
    assert "not checked: unheard-of" in capsys.readouterr().out


def test_a_mirror_without_advisories_is_no_all_clear(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report([SKIPPED]) == 0
    said = capsys.readouterr().out
    assert "nothing was checked" in said
    assert "vulnerabilities" not in said


def test_no_network_is_no_failure(
    audit: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise requests.ConnectionError

    monkeypatch.setattr(requests, "get", refuse)
    assert audit.main("constraints.txt") == 0
    assert "nothing was checked, PyPI is not reachable" in capsys.readouterr().out


def test_pip_audit_failing_is_a_failure(
    audit: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = requests.Response()
    reached.status_code = 200
    monkeypatch.setattr(requests, "get", lambda *_, **__: reached)
    assert audit.main(str(DEPLOY / "no-such-file.txt")) == 1
    assert "pip-audit failed" in capsys.readouterr().err


def test_make_asks_about_the_pinned_versions() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/ready", "audit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split()[-2:] == ["deploy/audit.py", "constraints.txt"]
