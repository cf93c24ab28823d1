"""docs/serving.md: its commands can be run, its requests are accepted, and what it names is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError

from dynaspec.cli.console import stopping
from dynaspec.cli.main import BAD_INPUT
from dynaspec.observe.families import ENGINE_FAMILIES
from dynaspec.server import middleware
from dynaspec.server.config import ServerConfig
from dynaspec.server.middleware import ADMISSION_FAMILIES, HTTP_FAMILIES
from dynaspec.server.protocol.base import RequestModel
from dynaspec.server.protocol.chat import ChatRequest
from dynaspec.server.protocol.completions import CompletionRequest
from dynaspec.server.run import ENGINE_DIED
from unit.deploy.serve_command import DEPLOY, DOCS, command, flags, parsed, shell_commands

TEXT = (DOCS / "serving.md").read_text()
PAGES = [DOCS / "serving.md", DOCS / "moving-from-vllm.md", DEPLOY / "README.md"]
REQUESTS: dict[str, type[RequestModel]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
FOREIGN_FLAGS = {"--cpus"}
"""Docker's."""


def commands_of(program: str) -> Iterator[list[str]]:
    """Arguments of a program, wherever a command on one of the pages calls it."""
    for page in PAGES:
        for words in shell_commands(page.read_text()):
            for start in [number for number, word in enumerate(words) if word == program]:
                yield words[start + 1 :]


SERVE = [words[1:] for words in commands_of("dynaspec") if words[:1] == ["serve"]]
IN_DOCKER = [words for words in commands_of("dynaspec") if words and words[0].startswith("models/")]


@pytest.mark.parametrize("arguments", [*SERVE, *IN_DOCKER], ids=" ".join)
def test_servers_take_their_options(arguments: list[str]) -> None:
    options = parsed(arguments)
    assert options.get("checkpoint") or options.get("demo") or options.get("config")


def test_there_are_commands() -> None:
    assert len(SERVE) >= 6
    assert len(IN_DOCKER) == 1


def curls() -> Iterator[tuple[str, dict[str, object]]]:
    for words in commands_of("curl"):
        if "-d" in words:
            [url] = [urlsplit(word) for word in words if word.startswith("http")]
            yield url.path, json.loads(words[words.index("-d") + 1])


@pytest.mark.parametrize(("path", "body"), [*curls()])
def test_requests_are_what_the_server_takes(path: str, body: dict[str, object]) -> None:
    if body.get("temperature") == -1:
        with pytest.raises(ValidationError):
            REQUESTS[path].model_validate(body)
    else:
        assert list(REQUESTS[path].model_validate(body).unknown_fields()) == []


def test_options_named_in_passing_exist() -> None:
    known = flags("serve") | flags("bench", "serve") | flags("explain") | FOREIGN_FLAGS
    named = {flag for code in re.findall(r"`([^`\n]*)`", TEXT) for flag in re.findall(r"(?<!\S)--[a-z-]+", code)}
    assert len(named) > 20
    assert {flag for flag in named if flag not in known and not _of_another_program(flag)} == set()


def _of_another_program(flag: str) -> bool:
    """Options of Prometheus and Compose, in commands that begin with their names."""
    return any(flag in code for code in re.findall(r"`((?:prometheus|docker) [^`]*)`", TEXT))


def test_other_commands_exist() -> None:
    for words in re.findall(r"`dynaspec ([a-z][a-z -]*?)(?= -|`| \w+\.\w+| \S+/)", TEXT):
        command(*words.split())


def test_metrics_named_exist() -> None:
    families = {family.name for family in (*ENGINE_FAMILIES, *HTTP_FAMILIES, *ADMISSION_FAMILIES)}
    like_metrics = r"(?:num|kv|request|time|http|guard|goodput|proposer|spec_decode)_[a-z_]+"
    options = {flag[2:].replace("-", "_") for flag in flags("serve")}
    named = set(re.findall(rf"[`:]({like_metrics})\b", TEXT)) - options
    assert len(named) >= 10
    assert named <= families


def test_what_is_shown_at_the_start_is_what_is_said() -> None:
    assert f"  stop       {stopping(ServerConfig.build({}))}" in TEXT


def test_exit_codes() -> None:
    assert f"| {ENGINE_DIED} | the engine has failed" in TEXT
    assert f"| {BAD_INPUT} | what was given cannot work" in TEXT


def test_open_paths_are_named() -> None:
    [sentence] = re.findall(r"Open without a key are (.*?)\.\n", TEXT, re.DOTALL)
    named = set(re.findall(r"`(/\w+)`", sentence))
    pages = {"/", "/dashboard", "/openapi.json"}  # "the dashboard's page", and what is no single word
    assert named == middleware._OPEN - pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), target
            assert not anchor or anchor in _anchors(linked.read_text()), target


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
