"""The words in which the dashboard says what is decided and why."""

from __future__ import annotations

from typing import Any

import pytest

from dynaspec.observe.counts import SpecCounts
from dynaspec.server.dashboard.decision import Decision, explain
from support.snapshots import snapshot

BELIEVED: dict[str, Any] = {
    "mode": "speculate",
    "plain_goodput": 1000.0,
    "plain_correction": 1.1,
    "speculation_goodput": 2000.0,
    "speculation_correction": 0.97,
    "lambda": 1950.0,
    "thresholds": [0.27, 0.214, 0.08, 0.07],
    "pace": 1.0,
}
BUSY = SpecCounts(steps=9, drafts=10, draft_tokens=40, accepted=28, emitted=38)


def said(
    recent: SpecCounts = BUSY, running: int = 2, believed: dict[str, Any] | None = None, **fields: Any
) -> Decision:
    estimates = BELIEVED | (believed or {})
    return explain(snapshot(running=running, **({"estimates": estimates} | fields)), recent)


def test_that_drafting_pays_is_said_with_both_expectations() -> None:
    decision = said(goodput=1900.0)
    assert decision.headline == "Drafting pays: 1,940 tokens/s expected against 1,100 plain."
    assert decision.mode == "speculating"
    assert (decision.plain_per_s, decision.drafting_per_s) == pytest.approx((1100.0, 1940.0))
    assert decision.measured_per_s == 1900.0
    assert decision.token_value_ms == pytest.approx(0.5128, abs=1e-4)


def test_why_is_said_in_sentences() -> None:
    worth, thresholds, correction, pace = said(believed={"pace": 1.35}).reasons
    assert worth == (
        "A token is worth 0.513\u00a0ms (λ = 1,950 tokens/s): each further draft token must bring in what it costs."
    )
    assert thresholds == (
        "A draft ends when the chance that all of it is accepted falls below 27\u00a0% after one token, "
        "21\u00a0% after two, 8.0\u00a0% after three."
    )
    assert correction == "Plain steps bring 10\u00a0% more than predicted, which is allowed for."
    assert pace == "Passes take 1.35 times what they took at start-up."


@pytest.mark.parametrize(
    ("believed", "mode", "headline"),
    [
        (
            {"mode": "plain", "speculation_goodput": 900.0},
            "plain",
            "Plain decoding is faster: 1,100 tokens/s against 873 expected with drafts.",
        ),
        ({"mode": "plain", "speculation_goodput": 0.0}, "plain", "Plain decoding: no draft is expected to pay."),
        (
            {"speculation_goodput": 1000.0},
            "speculating",
            "Drafting is given a chance: 970 tokens/s expected against 1,100 plain.",
        ),
        ({"mode": "probe_plain"}, "probing", "Trying a plain step: does drafting still pay?"),
        ({"mode": "probe_draft"}, "probing", "Trying short drafts: do they pay by now?"),
        ({"plain_goodput": 0.0}, "speculating", "Drafting, while the first steps show what it brings."),
    ],
)
def test_each_mode_has_its_words(believed: dict[str, Any], mode: str, headline: str) -> None:
    decision = said(believed=believed)
    assert (decision.mode, decision.headline) == (mode, headline)


def test_a_draft_is_not_said_to_end_where_none_is_made() -> None:
    assert not any("A draft ends" in reason for reason in said(believed={"mode": "plain"}).reasons)


def test_an_engine_without_requests_is_idle_once_the_last_steps_are_past() -> None:
    assert said(running=0).mode == "speculating"
    assert said(SpecCounts(), running=0, waiting=1).mode == "speculating"
    assert said(SpecCounts(), running=0).mode == "idle"


def test_without_a_drafter_it_is_said_how_to_get_one() -> None:
    decision = said(policy="none", estimates={})
    assert decision.mode == "off"
    assert "--draft-model" in decision.reasons[0]


def test_drafters_that_failed_are_said_to_be_off_only_when_all_are() -> None:
    assert said(proposers={"draft_model": False, "ngram": True}).mode == "speculating"
    assert said(proposers={"draft_model": False, "ngram": False}).headline == (
        "Drafting is off: the drafter failed too often."
    )


def test_a_policy_that_weighs_nothing_is_described_by_what_it_did() -> None:
    decision = said(policy="elastic", estimates={"acceptance": 0.7, "draft_confidence_threshold": 0.4}, goodput=80.0)
    assert decision.headline == "The policy “elastic” drafts 4.0 tokens at a time; 2.8 are accepted."
    assert decision.reasons[:2] == (
        "It believes that 70\u00a0% of the draft tokens are accepted.",
        "A draft ends where the drafter's confidence falls below 0.40.",
    )
    assert (decision.plain_per_s, decision.drafting_per_s, decision.measured_per_s) == (None, None, 80.0)
    assert said(SpecCounts(steps=1), policy="schedule", estimates={}).headline == (
        "The policy “schedule” drafts nothing now."
    )


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), "fast", None, True, [1.0]])
def test_estimates_that_are_no_numbers_are_left_out(nonsense: object) -> None:
    wrong = dict.fromkeys(("lambda", "pace", "plain_goodput", "speculation_goodput", "thresholds"), nonsense)
    decision = said(believed=wrong | {"plain_correction": 1.0, "thresholds": nonsense})
    assert decision.headline == "Drafting, while the first steps show what it brings."
    assert (decision.plain_per_s, decision.drafting_per_s, decision.token_value_ms) == (None, None, None)
