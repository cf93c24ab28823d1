"""The report of a decision log: what it says, and that no log, however odd, spoils it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import Limits, ProposerTraits, SpecPlan, StepView, StopRule
from dynaspec.explain import sentences
from dynaspec.explain.alternatives import POLICY, reasons
from dynaspec.explain.figures import lengths_over_time
from dynaspec.explain.log_data import load
from dynaspec.explain.report import analyse, render, write_report
from dynaspec.observe.decision_log import DecisionLog
from unit.explain.logs import Fixed, Host

EXPECTED: dict[str, Any] = {
    "mode": "speculate",
    "expected_tokens": 5.0,
    "expected_step_s": 0.006,
    "plain_goodput": 300.0,
    "draft_goodput": 500.0,
    "token_price_s": 0.002,
}
"""What ``auto`` says of a step, without what no reader of logs looks at."""

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
    stop = StopRule(below=(0.1,) * 4, signal="survival", weight=1.0, bias=(0.0,), offset=(0.0, 0.5))
    header = {"speculative_config": {"policy": "auto"}}
    path = Host(tmp_path / "log", rates=(0.9, 0.7, 0.6, 0.5), header=header).run(Fixed(4, stop, EXPECTED), 120)
    text, checked = report(path)
    assert checked.tags.count("svg") == 6
    for part in (
        "A <report>",
        "Decisions of the policy “auto”",
        "120 steps decoded 2 requests, at most 2 at a time",
        "A draft was made in 100 % of all cases",
        "By its own account the controller's steps were: drafting 100 %.",
        "Its reason for drafting was always: drafting was expected to be faster.",
        "On average a step was expected to emit 5.00 tokens and emitted ",
        "The median step was expected to take 6 ms and took ",
        "Drafting was expected to be faster than plain decoding in all 120 steps, by 67 % in the median.",
        "One more token was worth 2 ms in the median: a draft token was added only if it was expected to bring in more "
        "than it cost.",
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
        assert part in text


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


def test_the_estimate_rests_on_the_signal_where_there_is_more_than_a_confidence(tmp_path):
    """σ(2·0.25 + 1) at the second position, whatever the confidence is; the confidence is reported as it was."""
    stop = StopRule(below=(0.1,), signal="survival", weight=2.0, bias=(0.0, 1.0), offset=(0.0, 0.0))
    tests = load(Host(tmp_path / "log", rates=(0.9,), signal=0.25).run(Fixed(2, stop), 50)).verdicts
    assert tests.confidence == pytest.approx(0.9)
    assert tests.estimate[tests.position == 0] == pytest.approx(0.6224593)
    assert tests.estimate[tests.position == 1] == pytest.approx(0.8175745)


def test_the_signal_of_a_confidence_is_cut(tmp_path):
    stop = StopRule(below=(0.1,), signal="survival", offset=(0.0, 0.0))
    tests = load(Host(tmp_path / "log", rates=(1.0,)).run(Fixed(2, stop), 20)).verdicts
    assert tests.estimate == pytest.approx(0.9975274)  # σ(6)


def test_the_estimate_of_a_controller_without_stop_rule(tmp_path):
    believed = {"proposers": {"draft_model": {"signal": {"weight": 1.0, "bias": [0.0, 0.0]}}}}
    tests = load(Host(tmp_path / "log", rates=(0.7,)).run(Fixed(2, believed=believed), 20)).verdicts
    assert tests.estimate == pytest.approx(0.7)
    other = {"proposers": {"ngram": {"signal": {"weight": 1.0, "bias": [0.0, 0.0]}}}}
    tests = load(Host(tmp_path / "log", rates=(0.7,)).run(Fixed(2, believed=other), 20)).verdicts
    assert np.isnan(tests.estimate).all()


class Said(Fixed):
    """A controller that says something else in every step."""

    def __init__(self, length: int, said: list[dict[str, Any]]) -> None:
        super().__init__(length)
        self.said = said

    def estimates(self) -> Mapping[str, Any]:
        return self.said[min(self.planned, len(self.said)) - 1]

    def plan(self, view: StepView) -> SpecPlan:
        self.planned = view.step + 1
        return super().plan(view)


def probed(mode: str, cost: float, steps: int = 4) -> dict[str, Any]:
    return {"last_probe": {"mode": mode, "steps": steps, "cost_steps": cost, "steps_ago": 1}}


def expected_of(path: Path, said: list[dict[str, Any]], length: int = 2) -> str:
    """What the summary says of the controller's expectations."""
    data = load(Host(path).run(Said(length, said), len(said)))
    return " ".join(sentences.decisions(data) + sentences.expectations(data)).replace("\u00a0", " ")


def test_probes_are_told_with_what_they_cost(tmp_path: Path) -> None:
    """The last account of a probe counts; one that had ended before the log began does not."""
    before, plain = probed("plain", 7.0), {"mode": "plain"}
    said = [
        {"mode": "plain"} | before,
        *[{"mode": "probe_draft"} | before] * 3,
        plain | probed("draft", 0.5),
        plain | probed("draft", 0.75),
        *[{"mode": "probe_plain"} | probed("draft", 0.8)] * 2,
        {"mode": "speculate"} | probed("plain", -0.3, steps=2),
        {"mode": "speculate"} | probed("plain", -0.3, steps=2),
    ]
    text = expected_of(tmp_path / "log", said)
    assert (
        "1 probe of drafting and 1 probe of plain decoding ended in the log; together they cost the time of 0.5 steps, "
        "5.0 % of all. The last one tried plain decoding for 2 steps and gained the time of 0.3 steps."
    ) in text
    assert (
        "steps were: plain decoding 30 %, probes of drafting 30 %, probes of plain decoding 20 %, drafting 20 %" in text
    )


def test_a_single_probe(tmp_path: Path) -> None:
    text = expected_of(tmp_path / "log", [{"mode": "probe_plain"}, {"mode": "speculate"} | probed("plain", 1.0)])
    assert "1 probe of plain decoding ended in the log; it cost the time of 1.0 steps, 50 % of all." in text
    assert "The last one" not in text


@pytest.mark.parametrize(
    ("cost", "sentence"),
    [
        (-2.0, "2 probes of drafting ended in the log; together they gained the time of 4.0 steps."),
        (0.001, "2 probes of drafting ended in the log; together they cost next to nothing."),
    ],
)
def test_probes_that_cost_nothing(tmp_path: Path, cost: float, sentence: str) -> None:
    probe, plain = {"mode": "probe_draft"}, {"mode": "plain"}
    said = [probe, plain | probed("draft", cost), probe | probed("draft", cost), plain | probed("draft", cost)]
    assert sentence in expected_of(tmp_path / "log", said)


def test_which_was_expected_to_be_faster_and_why_the_slower_went_on(tmp_path: Path) -> None:
    said = [
        {"mode": "plain", "plain_goodput": 300.0, "draft_goodput": 240.0},
        {"mode": "plain", "plain_goodput": 300.0, "draft_goodput": 330.0},
        {"mode": "speculate", "plain_goodput": 300.0, "draft_goodput": 600.0},
        {"mode": "plain", "plain_goodput": 300.0, "draft_goodput": 0.0},
        {"mode": "plain", "plain_goodput": 300.0},
    ]
    text = expected_of(tmp_path / "log", said, length=0)
    for part in (
        "Drafting was expected to be faster than plain decoding in 67 % of 3 steps, by 55 % in the median.",
        "Plain decoding was expected to be faster than drafting in 33 % of 3 steps, by 25 % in the median.",
        "Nothing could be drafted in 1 step.",
    ):
        assert part in text
    counted = reasons(load(tmp_path / "log"))
    assert counted == {
        f"{POLICY}: plain decoding was expected to be faster": 2,
        f"{POLICY}: drafting was expected to be faster, but that was not confirmed yet, or too little to repay the "
        "change": 2,
        f"{POLICY}: a draft for this request was not expected to pay": 2,
        f"{POLICY}: nothing could be drafted": 2,
        POLICY: 2,
    }


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.82, 0, "fast", None, True, [1.0]])
def test_expectations_that_cannot_be_are_left_out(tmp_path: Path, wrong: object) -> None:
    believed = dict.fromkeys(EXPECTED, wrong) | {"mode": "speculate", "last_probe": wrong}
    data = load(Host(tmp_path / "log").run(Fixed(2, believed=believed), 5))
    assert sentences.expectations(data) == (["Nothing could be drafted in 5 steps."] if wrong == 0 else [])
    text, _ = report(tmp_path / "log")
    assert "This controller expects neither a goodput nor a step time" in text or wrong == 0


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
        {"mode": 3, "reason": None, "plain_goodput": "fast", "proposers": [1]},
        {"expected_step_s": float("inf"), "proposers": {"draft_model": {"signal": {"weight": "x"}}}},
        {"draft_goodput": True, "proposers": {"draft_model": {"signal": {"weight": 1.0}}}},
        {"expected_tokens": 1e-300, "expected_step_s": 0.01, "proposers": {"draft_model": {"signal": {"weight": 1.0}}}},
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


def test_costs_that_do_not_explain_the_log_are_warned_of_above_the_chart(tmp_path: Path) -> None:
    log = Host(tmp_path / "log", slow=lambda step: (0.5, 1.0, 3.0)[step * 7 % 3]).run(Fixed(3), 200)
    analysis = analyse(log)
    assert analysis.costs is not None
    assert analysis.costs.error > 0.2
    assert analysis.warning in analysis.summary
    compared = render(analysis, "report").split("<h2>What else could have been done</h2>")[1]
    assert compared.index("Warning: the fitted costs explain this log poorly") < compared.index("<svg")


def test_costs_that_explain_the_log_are_not_warned_of(tmp_path: Path) -> None:
    analysis = analyse(Host(tmp_path / "log").run(Fixed(3), 200))
    assert analysis.warning is None
    assert "Warning" not in render(analysis, "report")


def test_a_speed_that_was_not_measured_is_warned_of(tmp_path: Path) -> None:
    """The median step may be right where the whole is not."""
    analysis = analyse(Host(tmp_path / "log").run(Fixed(3), 200))
    assert analysis.costs is not None
    warning = sentences.poor_fit(analysis.costs, analysis.found, 0.5 * analysis.tokens_per_s)
    assert warning is not None
    assert f"where {0.5 * analysis.tokens_per_s:,.0f} were measured" in warning
