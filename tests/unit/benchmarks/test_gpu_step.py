"""benchmarks/gpu_step.py from end to end, on the CPU with its smallest shapes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_step.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_step", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_step", module)
    spec.loader.exec_module(module)
    return module


def test_writes_a_timing_for_every_pass(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(script.COPY_BYTES, "cpu", 2**16)
    out = tmp_path / "steps.json"
    sizes = ["--batch", "1", "2", "--rows", "1", "3", "--context", "20", "--repeats", "2"]
    script.main(["--shape", "tiny", "--device", "cpu", *sizes, "--out", str(out)])
    result = json.loads(out.read_text("utf-8"))
    passes = {(t["model"], t["batch"], t["rows"]) for t in result["timings"]}
    assert passes == {(model, batch, rows) for model in ("target", "drafter") for batch in (1, 2) for rows in (1, 3)}
    assert all(t["ms"] > 0 and t["floor_ms"] > 0 for t in result["timings"])
    assert result["provenance"]["torch"] == torch.__version__
    assert capsys.readouterr().out.count("target") == 4


def test_break_even_counts_drafter_passes_and_the_verify_pass(script: ModuleType) -> None:
    def timing(model: str, rows: int, ms: float) -> object:
        return script.Timing(model, 1, rows, "eager", ms, 1.0)

    timings = [timing("target", 1, 10.0), timing("target", 4, 12.0), timing("drafter", 1, 2.0)]
    assert script.break_even(timings[1], timings) == pytest.approx((3 * 2.0 + 12.0) / 10.0)
    assert script.break_even(timings[0], timings) is None
    assert script.break_even(timings[1], timings[:2]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_says_that_there_is_no_device(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="finds no CUDA device"):
        script.main([])
