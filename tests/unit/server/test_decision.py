"""The words in which the dashboard says what is decided and why."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.estimates import MODES
from dynaspec.server.dashboard.decision import Decision, explain
from support.snapshots import snapshot

EXPECTED: dict[str, Any] = {
    "mode": "speculate",
    "expected_tokens": 6.2,
    "expected_step_s": 0.0124,
    "plain_goodput": 1100.0,
    "draft_goodput": 1940.0,
    "plain_measured_over_expected": 1.1,
    "draft_measured_over_expected": 0.97,
    "token_price_s": 1 / 1950,
    "stop_below": [0.27, 0.214, 0.08, 0.07],
    "stop_all_below": [0.1, 0.1],
    "host_s": 0.0002,
    "speed_factor": 1.0,
    "change_steps": 0.5,
    "probe_budget_steps": 1.2,
    "last_probe": None,
    "target_curve": [[1.0, 0.001]],
    "proposers": {},
}
PROBE = {"mode": "draft", "steps": 4, "cost_steps": 0.62, "steps_ago": 1200}
BUSY = SpecCounts(steps=9, request_steps=10, drafts=10, draft_tokens=40, accepted=28, emitted=38, draft_emitted=38)


def said(
    recent: SpecCounts = BUSY, running: int = 2, expected: dict[str, Any] | None = None, **fields: Any
) -> Decision:
    estimates = EXPECTED | (expected or {})
    return explain(snapshot(running=running, **({"estimates": estimates} | fields)), recent)


def plain_text(sentence: str) -> str:
    return sentence.replace("\u00a0", " ")


def test_the_first_sentence_says_whether_speculation_helps_by_how_much_and_why() -> None:
    decision = said(goodput=1900.0)
    assert decision.headline == (
        "Speculation makes decoding 1.76 times as fast: 3.8 tokens a step instead of one, and a step takes 2.15 times "
        "as long."
    )
    assert decision.note == "Expected: 1,940 tokens/s with drafts, 1,100 without."
    assert decision.mode == "speculating"
    assert (decision.plain_per_s, decision.drafting_per_s) == (1100.0, 1940.0)
    assert decision.measured_per_s == 1900.0


def test_steps_that_were_partly_plain_do_not_explain_the_speedup() -> None:
    mixed = SpecCounts(steps=9, request_steps=30, drafts=10, emitted=38)
    assert said(mixed).headline == "Speculation makes decoding 1.76 times as fast."


def test_where_drafts_do_not_pay_it_is_said_how_often_they_would_be_accepted() -> None:
    drafters = {"draft_model": {"acceptance": [0.34, 0.2]}, "ngram": {"acceptance": [0.1]}}
    decision = said(expected={"mode": "plain", "draft_goodput": 873.0, "proposers": drafters})
    assert plain_text(decision.note) == (
        "Expected: 873 tokens/s with drafts, 1,100 without. The first token of a draft would be accepted in 34 % of "
        "the cases."
    )


def test_why_is_said_in_sentences() -> None:
    step, price, stop, deviation, factor, probe = said(expected={"speed_factor": 1.35, "last_probe": PROBE}).reasons
    assert step == "The latest step was expected to emit 6.2 tokens and take 12.4\u00a0ms."
    assert price == (
        "One more token is worth 0.513\u00a0ms: a draft token is added only if it is expected to bring in more than it "
        "costs."
    )
    assert stop == (
        "A draft ends when the chance that all of it is accepted falls below 27\u00a0% after one token, "
        "21\u00a0% after two, 8.0\u00a0% after three."
    )
    assert deviation == "Plain steps gave 10\u00a0% more tokens/s than predicted; the comparison allows for that."
    assert factor == "Steps take 35\u00a0% more time than at start-up."
    assert probe == (
        "The last probe tried drafting for 4 steps; it ended 1,200 steps ago and cost the time of 0.6 steps."
    )


@pytest.mark.parametrize(
    ("expected", "mode", "headline"),
    [
        (
            {"mode": "plain", "draft_goodput": 873.0},
            "plain",
            "Speculation is off for now, because decoding would be 21 % slower with it.",
        ),
        (
            {"mode": "plain", "draft_goodput": 1200.0},
            "plain",
            "Speculation is off for now. It seems to make decoding 1.09 times as fast, and starts once that is "
            "certain.",
        ),
        (
            {"mode": "plain", "draft_goodput": 0.0},
            "plain",
            "Speculation is off for now, because the drafter finds nothing to propose.",
        ),
        (
            {"mode": "plain", "draft_goodput": None},
            "plain",
            "Speculation is off for now, because what it would bring is not known yet.",
        ),
        (
            {"draft_goodput": 970.0},
            "speculating",
            "Speculation is on. It seems to make decoding 12 % slower, and stops once that is certain.",
        ),
        (
            {"draft_goodput": 1101.0},
            "speculating",
            "Speculation is on, and makes no difference: 1,100 tokens/s with it and without.",
        ),
        (
            {"mode": "plain", "draft_goodput": 1101.0},
            "plain",
            "Speculation is off for now, and makes no difference: 1,100 tokens/s with it and without.",
        ),
        (
            {"mode": "probe_plain"},
            "probing",
            "Speculation is on; a few steps without it show whether it still pays. So far it is 1.76 times as fast.",
        ),
        (
            {"mode": "probe_draft", "draft_goodput": 935.0},
            "probing",
            "Speculation is off; a few steps with it show whether it pays by now. So far it is 15 % slower.",
        ),
        (
            {"plain_goodput": 0.0},
            "speculating",
            "Speculation is on, and the first steps are to show what it brings.",
        ),
    ],
)
def test_each_mode_has_its_words(expected: dict[str, Any], mode: str, headline: str) -> None:
    decision = said(expected=expected)
    assert (decision.mode, plain_text(decision.headline)) == (mode, headline)


@pytest.mark.parametrize(("mode", "draft_goodput"), [("plain", 1200.0), ("speculate", 1000.0)])
def test_why_the_slower_mode_goes_on_is_said(mode: str, draft_goodput: float) -> None:
    expected = {"mode": mode, "draft_goodput": draft_goodput}
    assert said(expected=expected).reasons[0] == (
        "Changing over costs about 0.5 steps: it waits until the advantage is confirmed and large enough."
    )
    assert "Changing" not in " ".join(said(expected=expected | {"change_steps": 0.0}).reasons)


@pytest.mark.parametrize(
    ("probe", "sentence"),
    [
        (
            {"mode": "plain", "cost_steps": -0.4, "steps_ago": 1},
            "The last probe tried plain decoding for 4 steps; it ended 1 step ago and gained the time of 0.4 steps.",
        ),
        (
            {"steps": 1, "cost_steps": -0.01, "steps_ago": 0},
            "The last probe tried drafting for 1 step; it ended just now and cost next to nothing.",
        ),
    ],
)
def test_what_the_last_probe_cost(probe: dict[str, Any], sentence: str) -> None:
    assert said(expected={"last_probe": PROBE | probe}).reasons[-1] == sentence


@pytest.mark.parametrize(
    ("stop_below", "sentence"),
    [
        ([0.3, 0.0, 0.2], "A draft ends when the chance that all of it is accepted falls below 30 % after one token, "
         "20 % after three."),
        ([0.3, 1.2], "A draft ends when the chance that all of it is accepted falls below 30 % after one token. It "
         "ends after 2 tokens at the latest."),
        ([0.0, 0.0, float("inf")], "A draft ends after 3 tokens."),
        ([1.0], "A draft ends after one token."),
    ],
)  # fmt: skip
def test_where_drafts_end(stop_below: list[float], sentence: str) -> None:
    ends = [plain_text(reason) for reason in said(expected={"stop_below": stop_below}).reasons if "ends" in reason]
    assert ends == [sentence]


@pytest.mark.parametrize("stop_below", [[], [0.0, 0.0], [float("nan"), -0.5]])
def test_drafts_that_nothing_ends(stop_below: list[float]) -> None:
    assert not any("draft ends" in reason for reason in said(expected={"stop_below": stop_below}).reasons)


def test_steps_that_are_faster_than_at_start_up() -> None:
    assert "Steps take 30\u00a0% less time than at start-up." in said(expected={"speed_factor": 0.7}).reasons


def test_a_draft_is_not_said_to_end_where_none_is_made() -> None:
    assert not any("A draft ends" in reason for reason in said(expected={"mode": "plain"}).reasons)


def test_an_engine_without_requests_is_idle_once_the_last_steps_are_past() -> None:
    assert said(running=0).mode == "speculating"
    assert said(SpecCounts(), running=0, waiting=1).mode == "speculating"
    idle = said(SpecCounts(), running=0)
    assert idle.mode == "idle"
    assert idle.headline == (
        "No request is being decoded. With the last ones, speculation made decoding 1.76 times as fast."
    )


def test_an_idle_engine_that_compares_nothing_says_what_drafts_have_given() -> None:
    assert said(SpecCounts(), running=0, estimates={}).headline == "No request is being decoded."
    assert said(SpecCounts(), running=0, estimates={}, counts=BUSY).headline == (
        "No request is being decoded. So far a step with a draft has given 3.8 tokens instead of one."
    )


def test_without_a_drafter_it_is_said_how_to_get_one() -> None:
    decision = said(policy="none", estimates={})
    assert decision.mode == "off"
    assert "--draft-model" in decision.note


def test_drafters_that_failed_are_said_to_be_off_only_when_all_are() -> None:
    assert said(proposers={"draft_model": False, "ngram": True}).mode == "speculating"
    assert said(proposers={"draft_model": False, "ngram": False}).headline == (
        "Speculation is off, because the drafter failed too often."
    )


def test_a_policy_that_compares_nothing_is_described_by_what_it_did() -> None:
    decision = said(policy="elastic", estimates={"acceptance": 0.7, "draft_confidence_threshold": 0.4}, goodput=80.0)
    assert decision.headline == (
        "Speculation gives 3.8 tokens a step instead of one: the policy “elastic” drafts 4.0 tokens at a time, and 2.8 "
        "are accepted."
    )
    assert decision.reasons == (
        "It expects 70\u00a0% of the draft tokens to be accepted.",
        "A draft ends where the drafter's confidence falls below 0.40.",
    )
    assert (decision.plain_per_s, decision.drafting_per_s, decision.measured_per_s) == (None, None, 80.0)
    assert said(SpecCounts(steps=1), policy="schedule", estimates={}).headline == (
        "Speculation is off for now: the policy “schedule” drafts nothing."
    )


NONSENSE = st.sampled_from([float("nan"), float("inf"), -float("inf"), -1.82, "fast", None, True, [1.0], {}])


@given(wrong=st.dictionaries(st.sampled_from([name for name in EXPECTED if name != "mode"]), NONSENSE), data=st.data())
def test_estimates_that_cannot_be_are_left_out(wrong: dict[str, Any], data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(MODES))
    for name in ("stop_below", "last_probe"):
        if data.draw(st.booleans()):
            wrong[name] = [wrong.get(name)] if name == "stop_below" else PROBE | {"cost_steps": wrong.get(name)}
    decision = said(expected=wrong | {"mode": mode})
    words = " ".join((decision.headline, decision.note, *decision.reasons))
    assert not re.search(r"[-−–]\d|nan|inf\b|None|λ|ν|[Tt]rue", words)
    for number in (decision.plain_per_s, decision.drafting_per_s):
        assert number is None or number > 0.0


def test_without_numbers_nothing_is_said_of_them() -> None:
    decision = explain(snapshot(running=2, estimates={"mode": "speculate"}), BUSY)
    assert decision.headline == "Speculation is on, and the first steps are to show what it brings."
    assert decision.reasons == ()
    assert (decision.plain_per_s, decision.drafting_per_s) == (None, None)
