from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dynaspec.bench.explain.data import load
from dynaspec.bench.explain.figures import lengths_over_time
from dynaspec.bench.explain.report import analyse, render, write_report
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Limits, ProposerTraits, StopRule
from dynaspec.observe.decision_log import DecisionLog

from .logs import Fixed, Host

VOID = {"meta", "br", "img", "link", "input"}


class Checked(HTMLParser):
    """Tags that match, nothing from elsewhere, no script."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in ("script", "link", "iframe")
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith(("#", "data:")), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def report(path: Path) -> tuple[str, Checked]:
    """The report's text, as a reader sees it, and what it is made of."""
    html = render(analyse(path), "A <report>")
    assert "url(http" not in html
    assert "@import" not in html
    checked = Checked()
    checked.feed(html)
    checked.close()
    assert not checked.open
    return re.sub(r"\s+", " ", " ".join(checked.text)), checked


def test_everything(tmp_path):
    believed = {
        "mode": "speculate",
        "reason": "it pays",
        "goodput": 500.0,
        "plain_goodput": 300.0,
        "predicted_step_s": 0.006,
        "predicted_emitted": 5.0,
    }
    stop = StopRule(below=(0.1,) * 4, signal="survival", weight=1.0, bias=(0.0,), offset=(0.0, 0.5))
    header = {"speculative_config": {"policy": "auto"}}
    path = Host(tmp_path / "log", rates=(0.9, 0.7, 0.6, 0.5), header=header).run(Fixed(4, stop, believed), 120)
    text, checked = report(path)
    assert checked.tags.count("svg") == 6
    for words in (
        "A <report>",
        "Decisions of the policy “auto”",
        "120 steps decoded 2 requests, at most 2 at a time",
        "A draft was made in 100 % of all cases",
        "By its own account the controller's steps were: speculate 100 %.",
        "Its reason for “speculate” was always: it pays.",
        "By estimate, plain decoding would have been",
        "The best fixed length",
        "The oracle, which drafts exactly as far as the target agrees",
        "Estimates, not measurements.",
        "The controller's expected step time was off by",
        "The controller's estimate is off by",
        "AUC",
        "Where time went",
        "0 of 240 cases (a request in a step) had no draft verified.",
    ):
        assert words in text


def test_the_estimate_is_what_the_stop_rule_says(tmp_path):
    """σ(2·logit(0.9) + 1 + offset) at the second position."""
    stop = StopRule(below=(0.1,), signal="survival", weight=2.0, bias=(0.0, 1.0), offset=(0.0, -1.0))
    tests = load(Host(tmp_path / "log", rates=(0.9,)).run(Fixed(2, stop), 100)).verdicts
    for request, position, expected in (
        (0, 0, 81 / 82),
        (1, 1, 81 / 82),
        (0, 1, 81 * 2.718281828 / (1 + 81 * 2.718281828)),
    ):
        found = tests.estimate[(tests.request == request) & (tests.position == position)]
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_estimate_rests_on_the_evidence_where_there_is_more_than_a_confidence(tmp_path):
    """σ(2·0.25 + 1) at the second position, whatever the confidence is; the confidence is reported as it was."""
    stop = StopRule(below=(0.1,), signal="survival", weight=2.0, bias=(0.0, 1.0), offset=(0.0, 0.0))
    tests = load(Host(tmp_path / "log", rates=(0.9,), evidence=0.25).run(Fixed(2, stop), 50)).verdicts
    assert tests.confidence == pytest.approx(0.9)
    assert tests.estimate[tests.position == 0] == pytest.approx(0.6224593)
    assert tests.estimate[tests.position == 1] == pytest.approx(0.8175745)


def test_the_evidence_of_a_confidence_is_cut(tmp_path):
    stop = StopRule(below=(0.1,), signal="survival", offset=(0.0, 0.0))
    tests = load(Host(tmp_path / "log", rates=(1.0,)).run(Fixed(2, stop), 20)).verdicts
    assert tests.estimate == pytest.approx(0.9975274)  # σ(6)


def test_the_estimate_of_a_controller_without_stop_rule(tmp_path):
    believed = {"survival": {"weight": 1.0, "bias": [0.0, 0.0]}}
    tests = load(Host(tmp_path / "log", rates=(0.7,)).run(Fixed(2, believed=believed), 20)).verdicts
    assert tests.estimate == pytest.approx(0.7)


@pytest.mark.parametrize(("steps", "length", "rate"), [(1, 0, 0.0), (1, 1, 1.0), (2, 8, 0.0), (2, 8, 1.0)])
def test_tiny_logs(tmp_path, steps, length, rate):
    text, _ = report(Host(tmp_path / "log", rates=(rate,), ids=("a",)).run(Fixed(length), steps))
    assert f"{steps} step" in text
    assert ("Nothing was drafted" in text) == (length == 0)
    assert ("No drafted token was tested." in text) == (length == 0)


def test_a_step_of_prefill_alone(tmp_path):
    text, checked = report(Host(tmp_path / "log", ids=(), prefill=9).run(Fixed(3), 1))
    assert "No step had a decoding request" in text
    assert "svg" not in checked.tags


def test_a_host_that_measures_no_time(tmp_path):
    text, _ = report(Host(tmp_path / "log", timed=False).run(Fixed(3), 9))
    assert "tokens/s" not in text
    assert "Draft lengths" in text
    assert "Acceptance" in text


@pytest.mark.parametrize(
    "believed",
    [
        {"mode": 3, "reason": None, "goodput": "fast", "survival": [1]},
        {"goodput": float("nan"), "predicted_step_s": float("inf"), "survival": {"weight": "x"}},
        {"survival": {"weight": 1.0}, "plain_step_s": 0.0, "goodput": True},
        {"survival": {"weight": 1.0, "bias": []}, "plain_step_s": 0.01, "goodput": 1e-300},
    ],
)
def test_estimates_of_other_controllers(tmp_path, believed):
    text, _ = report(Host(tmp_path / "log").run(Fixed(3, believed=believed), 5))
    assert "Goodput" in text


def test_names_cannot_spoil_the_page(tmp_path):
    ids = ("<script>alert(1)</script>", "$x_1$ & co", "a" * 200, "日本")
    believed = {"mode": "<b>", "reason": "a < b & $c$"}
    text, _ = report(
        Host(tmp_path / "log", ids=ids, header={"model": "</pre><script>"}).run(Fixed(0, believed=believed), 5)
    )
    assert "a < b & $c$" in text
    assert "$x_1$ & co" in text


def test_confidences_that_are_no_numbers(tmp_path):
    path = Host(tmp_path / "log", rates=(0.5,)).run(Fixed(3), 20)
    path.write_text(path.read_text("ascii").replace("[0.5,0.5,0.5]", '[0.5,"NaN","Infinity"]'), "ascii")
    report(path)


def test_many_requests_and_steps(tmp_path):
    host = Host(tmp_path / "log", ids=tuple(f"request-{i}" for i in range(80)))
    text, _ = report(host.run(Fixed(2), 300))
    assert "60 of 80 requests are shown" in text


def test_steps_given_up_are_left_out(tmp_path):
    path = Host(tmp_path / "log").run(Fixed(2), 4)
    lines = path.read_text("ascii").splitlines(keepends=True)
    kept = [line for line in lines if not ('"step":1' in line and '"call":"observe"' in line)]
    path.write_text("".join(kept), "ascii")
    text, _ = report(path)
    assert "3 steps decoded" in text
    assert "1 planned steps were given up" in text


def test_unknown_fields_are_passed_over(tmp_path):
    path = Host(tmp_path / "log").run(Fixed(2), 4)
    lines = [json.loads(line) for line in path.read_text("ascii").splitlines()]
    for line in lines:
        line["new"] = 1
        for value in line.values():
            if isinstance(value, dict):
                value["newer"] = [2]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "ascii")
    assert "4 steps decoded" in analyse(path).summary[0]


def test_the_same_log_gives_the_same_picture(tmp_path):
    path = Host(tmp_path / "log").run(Fixed(2), 20)
    assert lengths_over_time(load(path)) == lengths_over_time(load(path))


@pytest.mark.parametrize("given", ["empty", "no steps"])
def test_nothing_to_explain(tmp_path, given):
    path = tmp_path / "log"
    if given == "empty":
        path.touch()
    else:
        DecisionLog(path).close()
    with pytest.raises(ConfigError, match="holds no complete line" if given == "empty" else "no committed step"):
        analyse(path)


def test_a_report_that_cannot_be_written(tmp_path):
    analysis = analyse(Host(tmp_path / "log", ids=()).run(Fixed(2), 2))
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        write_report(analysis, tmp_path, "t")


def test_plain_decoding_needs_no_verdict(tmp_path):
    limits = Limits((0,))
    analysis = analyse(replace(Host(tmp_path / "log"), limits=limits).run(Fixed(0), 9))
    summary: Any = " ".join(analysis.summary)
    assert "By estimate" not in summary


def test_a_host_that_measures_whole_steps_without_confidences(tmp_path):
    limits = Limits(tuple(range(9)), proposers=(ProposerTraits("draft_model", has_confidence=False),))
    host = Host(tmp_path / "log", limits=limits, header={"host": "vllm"}, whole=True, silent=True)
    text, checked = report(host.run(Fixed(3), 60))
    assert "on vLLM, dynaspec" in text
    assert "vLLM says how long a step took" in text
    assert "Reliability" not in text
    assert "Neither drafter nor controller says how sure it is" in text
    assert "not how much of that was drafting" in text
    for absent in ("verification", "the rest of the step"):
        assert absent not in text
    assert checked.tags.count("svg") == 6
