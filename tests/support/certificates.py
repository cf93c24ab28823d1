"""Certificates for tests of HTTPS."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1, signed by itself, and its key; by the ``openssl`` command."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        ["openssl", "req", *options, *names, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return str(certificate), str(key)
