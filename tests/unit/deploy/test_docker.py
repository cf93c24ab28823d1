"""The image: who runs what in it, what it asks of itself, what goes into it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from unit.deploy.serve_command import DEPLOY, ROOT, parsed

FILE = DEPLOY / "docker/Dockerfile"


def instructions(text: str) -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


ALL = instructions(FILE.read_text())
LAST_STAGE = ALL[max(number for number, (word, _) in enumerate(ALL) if word == "FROM") :]


def last(word: str) -> str:
    [rest] = [rest for name, rest in LAST_STAGE if name == word]
    return rest


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in last("ENV").split())


def health_check() -> str:
    check = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    assert check[:2] == ["python", "-c"]
    return check[2]


def test_it_runs_as_a_user_without_rights() -> None:
    user, group = last("USER").split(":")
    assert int(user) > 1000
    assert int(group) > 1000
    assert LAST_STAGE.index(("USER", last("USER"))) < LAST_STAGE.index(("ENTRYPOINT", last("ENTRYPOINT")))


def test_the_entry_point_is_serve_itself() -> None:
    program, name, *options = json.loads(last("ENTRYPOINT"))
    assert (program, name) == ("dynaspec", "serve")
    options = parsed([*options, "models/smollm2.gguf"])
    assert options["host"] == "0.0.0.0"
    assert str(options["port"]) == last("EXPOSE")
    assert last("STOPSIGNAL") == "SIGTERM"


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Sick(Health):
    status = 503


@pytest.fixture
def listening(request: pytest.FixtureRequest) -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), request.param) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("listening", "healthy"), [(Health, True), (Sick, False)], indirect=["listening"])
def test_the_health_check_asks_the_server(listening: int, healthy: bool) -> None:
    code = health_check()
    assert code.count(last("EXPOSE")) == 1
    ended = subprocess.run(
        [sys.executable, "-c", code.replace(last("EXPOSE"), str(listening))],
        env={"http_proxy": "http://127.0.0.1:9"},  # which is none of its business
        capture_output=True,
        check=False,
    )
    assert (ended.returncode == 0) is healthy


def test_all_that_is_written_goes_to_the_volume() -> None:
    volume = last("VOLUME")
    caches = {name: path for name, path in environment().items() if name.endswith(("_DIR", "_HOME"))}
    assert {"NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME"} == caches.keys()
    assert all(path.startswith(volume + "/") for path in caches.values())
    assert f"install --directory --owner dynaspec --group dynaspec {volume}" in last("RUN")


def test_no_secrets_and_no_build_tools_come_along() -> None:
    text = FILE.read_text()
    assert not re.search(r"(?i)\b(api_?key|token|password|secret)\s*=", text)
    assert [rest for word, rest in LAST_STAGE if word == "ARG"] == ['RUNTIME_PACKAGES=""']
    assert "pip" not in last("RUN")
    assert all("--without-pip" in rest for _, rest in ALL if "-m venv" in rest)


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for word, rest in ALL if word == "COPY" and "--from" not in rest for source in rest.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_torch_alone_comes_from_its_own_index() -> None:
    [install] = [rest for _, rest in ALL if "--index-url" in rest]
    assert install.endswith("--no-deps torch")
    assert not any("--extra-index-url" in rest for _, rest in ALL)
