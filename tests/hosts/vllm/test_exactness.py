"""Greedy output is that of vLLM without speculation, token for token, whatever decides about the drafts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import dynaspec.hosts.vllm.scheduler_adapter as adapter_module
from dynaspec.contract.errors import ConfigError
from hosts.vllm.engines import LONGEST, Driven
from hosts.vllm.requests import Outputs, mixed

PROFILE = Path(__file__).resolve().parents[2] / "unit/control/h100_profile.json"
POLICIES: dict[str, dict[str, Any]] = {
    "constant": {"policy": "constant"},
    "heuristic": {"policy": "heuristic", "num_speculative_tokens": 2},
    "heuristic_transient": {"policy": "heuristic_transient", "num_speculative_tokens": 2},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 3, 5], [4, 7, 0], [8, 64, 3]]},
    "goodput": {"policy": "goodput", "dynamic_config_path": str(PROFILE)},
    "elastic": {"policy": "elastic", "draft_length_options": [1, 3, 5]},
    "disable_by_batch_size": {"policy": "constant", "disable_by_batch_size": 4},
}
FEW = 16


def test_64_mixed_requests_in_tight_memory(driven: Driven, plain: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, preempted = driven.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda request, *rest, **named: (preempted.append(request), preempt(request, *rest, **named)),
    )
    outputs, decided = driven.generate(*mixed(driven.llm.get_tokenizer()), policy="auto")
    assert outputs == plain
    assert preempted
    assert scheduler._adapter.deciding
    assert len(set(decided.lengths)) > 2  # k varies
    for call in decided.plans:
        wishes = zip(call.view.max_draft, call.plan.depth, strict=True)
        assert all(wish is None or depth <= wish for wish, depth in wishes)
    assert {0, 1, 2, None} == {wish for call in decided.plans for wish in call.view.max_draft}
    outcomes = decided.outcomes
    assert {"rejected", "all_accepted", "stopped", "invalid"} <= {end for o in outcomes for end in o.ended}
    assert all(a <= v <= d for o in outcomes for a, v, d in zip(o.accepted, o.verified, o.drafted, strict=True))
    result = decided.replayed()
    assert result.plans > 50
    assert result.identical, result.first


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_changes_nothing_but_the_work(policy: str, driven: Driven, plain: Outputs) -> None:
    requests = mixed(driven.llm.get_tokenizer(), FEW)
    outputs, decided = driven.generate(*requests, **POLICIES[policy])
    assert outputs == plain[:FEW]
    assert any(decided.lengths)
    result = decided.replayed()
    assert result.identical, result.first
    if policy == "schedule":
        k = {n: {max(c.plan.depth) for c in decided.plans if len(c.plan.depth) == n} for n in (2, 5, 9)}
        assert k[5] == {0}
        assert max(k[2]) > 0
        assert max(k[9]) > 0  # drafting, then none, then drafting again
    if policy == "disable_by_batch_size":
        assert {len(call.plan.depth) <= 4 for call in decided.plans if any(call.plan.depth)} == {True}


def test_model_drafters_keep_up_even_where_nothing_is_drafted(driven: Driven) -> None:
    requests = mixed(driven.llm.get_tokenizer(), 2)
    _, decided = driven.generate(*requests, num_speculative_tokens_per_batch_size=[[1, 64, 0]])
    assert set(decided.lengths) == {0}
    passes = {len(outcome.work.rows_per_pass) for outcome in decided.outcomes}
    assert passes == ({1} if driven.method == "draft_model" else {0})


class Failing:
    def __init__(self, inner: Any) -> None:
        self._inner, self._left = inner, 6

    def plan(self, view: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("a fault of the controller's")
        return self._inner.plan(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_fault_costs_the_decisions_alone(
    driven: Driven, plain: Outputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = adapter_module.build_controller
    monkeypatch.setattr(adapter_module, "build_controller", lambda *given, **named: Failing(build(*given, **named)))
    outputs, _ = driven.generate(*mixed(driven.llm.get_tokenizer(), FEW), policy="elastic")
    assert outputs == plain[:FEW]
    assert not driven.scheduler._adapter.deciding
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith("dynaspec")]
    assert errors == [f"dynaspec has failed; from now on vLLM drafts {LONGEST} tokens in every step"]


def test_what_vllm_s_drafters_cannot_do_is_refused(driven: Driven) -> None:
    with pytest.raises(ConfigError) as refused:
        driven.under(policy="confidence")
    reason = (
        "policy is 'confidence', but this host cannot stop between draft passes"
        if driven.method == "draft_model"
        else "policy is 'confidence' but method is 'ngram', which has no confidence"
    )
    assert str(refused.value).startswith(reason)
