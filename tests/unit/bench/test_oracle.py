from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from dynaspec.bench import oracle as report
from dynaspec.bench import oracle as study_module
from dynaspec.bench.datasets import BenchPrompt
from dynaspec.bench.oracle import ORACLE, run_study, summarise
from dynaspec.bench.oracle_steps import Iteration, fixed, stopped, walk
from dynaspec.bench.plots import plot_iterations, plot_speeds
from dynaspec.contract.errors import ConfigError
from dynaspec.control.policies.short_names import parse_policy

PROMPTS = [
    BenchPrompt("the quick brown fox", "text"),
    BenchPrompt("def add(a, b):", "code"),
    BenchPrompt("1 2 3", "text"),
]


@pytest.fixture(scope="module")
def study(tiny):
    specs = [parse_policy(name, tiny.drafter) for name in ("confidence:0.5:20", "auto")]
    return run_study(tiny.target, tiny.drafter, PROMPTS, specs, 40, 1, lambda *_: None)


def test_fixed_lengths_take_the_passes_that_were_computed(study):
    for task in study.tasks:
        for k in study_module.FIXED:
            ran = study.rounds[0].runs[task.name][f"constant:{k}"].walks
            assert ran == tuple(fixed(text, k) for text in task.texts)


def test_confidences_behind_a_mismatch_are_those_of_the_engine(study):
    for task in study.tasks:
        ran = study.rounds[0].runs[task.name]["confidence:0.5:20"].walks
        assert ran == tuple(walk(text, stopped(text.rollouts.confidence, 0.5)) for text in task.texts)


def test_summary(study, tmp_path):
    results = summarise(study)
    assert [result.name for result in results] == ["text", "code", "all"]
    for result in results:
        oracle, best = result.line(ORACLE), result.line(result.best_fixed)
        assert oracle.measured is None
        # Not its speed: here a drafter pass costs as much as the target's.
        assert best.gap in (0.0, None)
        assert oracle.gap in (1.0, None)
        assert {line.passes.tokens for line in result.lines} == {oracle.passes.tokens}
        assert oracle.passes.target == min(line.passes.target for line in result.lines)
    assert results[2].prompts == 3
    sides = report.shown_sides(results[0], ["confidence:0.5:20", "auto"])
    assert sides[0] == results[0].best_fixed
    assert sides[-1] == ORACLE
    document = json.loads(json.dumps(report.as_document(study, results, {"rounds": 1})))
    assert document["tasks"]["all"]["sides"]["plain"]["passes"]["drafter"] == 0
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.as_table(results[2]))
    shown = console.export_text()
    for name in ("threshold per position", "survival by confidence", "survival by signal"):
        assert f"hindsight: {name} " in shown
    plot_iterations(results[0], sides, tmp_path / "i.png")
    plot_speeds(results, tmp_path / "s.png", "title")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_text_picture():
    steps = (Iteration(3, 1), Iteration(0, 0), Iteration(2, 2), Iteration(5, 0))
    assert report.picture(steps) == ["●○○ · ●● ○○○○○"]
    assert report.picture(steps, width=8) == ["●○○ · ●●", "○○○○○"]


def test_what_cannot_be_studied(tiny):
    with pytest.raises(ConfigError, match="expected at least 2 and 1"):
        run_study(tiny.target, tiny.drafter, PROMPTS, [], 1, 1, lambda *_: None)
