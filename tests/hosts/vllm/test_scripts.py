"""The scripts of ``tests/vllm_scripts`` run with vLLM too, as they are, and print lines of the same kinds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hosts.vllm.engines import MODELS

SCRIPTS = Path(__file__).resolve().parents[2] / "vllm_scripts"
ARGUMENTS = {
    "basic": [],
    "sampling": [],
    "token_prompts": [],
    "chat": [],
    "chat_with_tools": [],
    "structured_outputs": [],
    "spec_decode": ["--method", "ngram"],
    "metrics": [],
    "engine_args": ["--max-model-len", "256"],
}


def run(name: str, *arguments: str) -> list[str]:
    """Lines that a script prints in a process of its own."""
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--model", str(MODELS / "target"), *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_every_script_is_run() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_with_vllm(name: str) -> None:
    lines = run(name, *ARGUMENTS[name])
    if name == "basic":
        assert len([line for line in lines if line.startswith("Prompt: ")]) == 3
    if name == "chat":
        assert len([line for line in lines if line.startswith("Prompt: ")]) == 5
    if name == "spec_decode":
        assert any(line.startswith("num_accepted_tokens: ") for line in lines)
    if name == "metrics":
        assert "vllm:generation_tokens (counter) = 16" in lines
