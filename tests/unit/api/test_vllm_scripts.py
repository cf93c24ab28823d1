"""Scripts for vLLM run when ``vllm`` has become ``dynaspec`` in their imports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
SCRIPTS = TESTS / "vllm_scripts"
TARGET, DRAFT = str(TESTS / "models/target"), str(TESTS / "models/draft")
MODULES = {
    "vllm": "dynaspec",
    "vllm.inputs": "dynaspec.inputs",
    "vllm.sampling_params": "dynaspec.sampling_params",
    "vllm.v1.metrics.reader": "dynaspec.metrics",
}


class Run:
    """Runs a script; what it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, name: str, *arguments: str) -> list[str]:
        path = SCRIPTS / f"{name}.py"
        text = re.sub(
            r"^from (vllm\S*) import", lambda found: f"from {MODULES[found[1]]} import", path.read_text(), flags=re.M
        )
        assert "from vllm" not in text
        self._monkeypatch.setattr("sys.argv", [path.name, "--model", TARGET, *arguments])
        exec(compile(text, path, "exec", dont_inherit=True), {"__name__": "__main__"})
        return self._capsys.readouterr().out.splitlines()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


def test_every_script_is_run() -> None:
    source = Path(__file__).read_text()
    assert all(f'run("{path.stem}"' in source for path in SCRIPTS.glob("*.py"))


def test_basic(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    lines = run("basic")
    assert len(lines) == 3
    assert all(re.fullmatch(r"Prompt: .+, Output: ['\"].+['\"]", line) for line in lines)
    assert [record.message.split("=")[0] for record in caplog.records] == ["gpu_memory_utilization"]


def test_engine_args(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    lines = run("engine_args", "--max-model-len", "256", "--enforce-eager", "--gpu_memory_utilization", "0.5")
    assert lines == ["8 Hello, my name is", "8 The capital of France is"]
    assert [record.message.split("=")[0] for record in caplog.records] == ["gpu_memory_utilization"]


def test_sampling(run: Run) -> None:
    lines = run("sampling")
    assert lines[-1] == "reproducible: True"
    assert len({line.partition(": ")[2] for line in lines[:-1:2]}) > 1


def test_token_prompts(run: Run) -> None:
    lines = run("token_prompts")
    assert [line.split()[0] for line in lines] == ["4", "8", "12"]
    texts = [json.dumps(line.partition(" ")[2]).strip('"')[:-1] for line in lines]
    assert texts[2].startswith(texts[1])
    assert texts[1].startswith(texts[0])


def test_chat(run: Run) -> None:
    text = "\n".join(run("chat"))
    assert text.count("Answer: ") == 5 + text.count("nAnswer: ")
    assert "Question: Write about a small town.\\nAnswer:'" in text
    assert "Answer: The town'" in text
    assert "Prompt: 'Hello and then'" in text


def test_chat_with_tools(run: Run) -> None:
    lines = run("chat_with_tools")
    assert lines[0] == "called with ['city', 'unit']"


def test_structured_outputs(run: Run) -> None:
    told = dict(line.split(": ", 1) for line in run("structured_outputs"))
    assert told["choice"] in ("Positive", "Negative")
    assert re.fullmatch(r"[a-z]{1,8}@[a-z]{1,8}\.com", told["regex"])
    assert json.loads(told["json"])["car_type"] in ("sedan", "SUV")
    assert re.fullmatch(r"SELECT col_[12] from table_[12] where col_[12] = [12]", told["grammar"])


def test_speculation_changes_no_token(run: Run) -> None:
    drafted = run("spec_decode", "--method", "draft_model", "--draft-model", DRAFT)
    looked_up = run("spec_decode", "--method", "ngram")
    assert drafted[:3] == looked_up[:3]
    for lines in (drafted, looked_up):
        told = dict(line.split(": ") for line in lines[3:])
        assert 0 < int(told["num_accepted_tokens"]) <= int(told["num_draft_tokens"])
        assert float(told["mean acceptance length"]) > 1


def test_metrics(run: Run) -> None:
    lines = run("metrics")
    assert "vllm:generation_tokens (counter) = 16" in lines
    assert "vllm:num_requests_running (gauge) = 0" in lines
    assert any(
        line.startswith("vllm:time_to_first_token_seconds (histogram)") and line.endswith("= 2") for line in lines
    )
