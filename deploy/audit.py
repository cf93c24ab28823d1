"""Looks for known vulnerabilities in the pinned versions: ``make audit``.

pip-audit asks PyPI about each of them. Exit code 1: it knows a vulnerability, or pip-audit itself fails. Where PyPI, or
its advisories, cannot be had (mirrors often have none), that is said instead of an all-clear, and the exit code is 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import requests

_ADVISORIES = "https://pypi.org/pypi/pip/json"
_PATIENCE_S = 15


def main(constraints: str) -> int:
    """
    Args:
        constraints: file with a pinned version a line.

    Returns:
        The exit code.
    """
    try:
        requests.get(_ADVISORIES, timeout=_PATIENCE_S).raise_for_status()
    except requests.RequestException as error:
        print(f"audit: nothing was checked, PyPI is not reachable ({type(error).__name__})")
        return 0
    command = ["pip_audit", "--requirement", constraints, "--disable-pip", "--no-deps", "--progress-spinner", "off"]
    answer = subprocess.run(
        [sys.executable, "-m", *command, "--format", "json"], capture_output=True, text=True, check=False
    )
    try:
        found = json.loads(answer.stdout)["dependencies"]
    except ValueError:
        print(f"audit: pip-audit failed\n{answer.stderr}", file=sys.stderr)
        return 1
    return report(found)


def report(found: Sequence[dict[str, Any]]) -> int:
    """Says what pip-audit has found.

    Args:
        found: an entry a package: ``vulns``, or ``skip_reason``.

    Returns:
        The exit code.
    """
    checked = [one for one in found if "skip_reason" not in one]
    skipped = [one["name"] for one in found if "skip_reason" in one]
    if not checked:
        print("audit: nothing was checked, what stands for PyPI here has no advisories")
        return 0
    known = [(one, vulnerability) for one in checked for vulnerability in one["vulns"]]
    for one, vulnerability in known:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}")
    print(f"audit: {len(checked)} packages checked, {len(known)} known vulnerabilities")
    if skipped:
        print(f"audit: not checked: {', '.join(skipped)}")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
