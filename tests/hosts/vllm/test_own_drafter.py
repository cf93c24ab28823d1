"""dynaspec's drafter in vLLM's worker: greedy output is that of vLLM without speculation, whatever is drafted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from hosts.vllm.engines import OwnDriven
from hosts.vllm.requests import Outputs, mixed

PROFILE = Path(__file__).resolve().parents[2] / "unit/control/h100_profile.json"
POLICIES: dict[str, dict[str, Any]] = {
    "constant": {"policy": "constant"},
    "heuristic": {"policy": "heuristic", "num_speculative_tokens": 2},
    "heuristic_transient": {"policy": "heuristic_transient", "num_speculative_tokens": 2},
    "confidence": {"policy": "confidence", "draft_confidence_threshold": 0.6},
    "confidence auto": {"policy": "confidence", "draft_confidence_scope": "request"},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 3, 5], [4, 7, 0], [8, 64, 3]]},
    "goodput": {"policy": "goodput", "dynamic_config_path": str(PROFILE)},
    "elastic": {"policy": "elastic", "draft_length_options": [1, 3, 5]},
    "gating": {"policy": "constant", "kv_write_gating_threshold": 0.5},
    "disable_by_batch_size": {"policy": "constant", "disable_by_batch_size": 4},
    "ngram": {"method": "ngram", "policy": "constant", "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "policy": "constant", "num_speculative_tokens": 5},
    "ngram auto": {"method": "ngram", "policy": "auto"},
    "without look-ups": {"policy": "auto", "prompt_lookup_max": 0},
}
FEW = 16


def test_64_mixed_requests_in_tight_memory(own: OwnDriven, plain: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, preempted = own.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda request, *rest, **named: (preempted.append(request), preempt(request, *rest, **named)),
    )
    outputs, decided = own.generate(*mixed(own.llm.get_tokenizer()), policy="auto")
    assert outputs == plain
    assert preempted
    assert scheduler._adapter.deciding
    assert len(set(decided.lengths)) > 2  # k varies
    outcomes = decided.outcomes
    assert {"rejected", "all_accepted"} <= {end for o in outcomes for end in o.ended}
    assert all(a <= v <= d for o in outcomes for a, v, d in zip(o.accepted, o.verified, o.drafted, strict=True))
    assert sum(sum(o.accepted) for o in outcomes) > 0
    assert decided.plans[0].view.limits.plan_lag == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_changes_nothing_but_the_work(policy: str, own: OwnDriven, plain: Outputs) -> None:
    requests = mixed(own.llm.get_tokenizer(), FEW)
    outputs, decided = own.generate(*requests, **POLICIES[policy])
    assert outputs == plain[:FEW]
    assert any(decided.lengths)
    if policy == "disable_by_batch_size":
        assert {len(call.plan.depth) <= 4 for call in decided.plans if any(call.plan.depth)} == {True}
    else:
        assert any(sum(outcome.accepted) for outcome in decided.outcomes)
    if policy == "schedule":
        k = {n: {max(c.plan.depth) for c in decided.plans if len(c.plan.depth) == n} for n in (2, 5, 9)}
        assert k[5] == {0}
        assert max(k[2]) > 0
        assert max(k[9]) > 0  # drafting, then none, then drafting again
    if policy == "gating":
        assert sum(outcome.work.kv_skipped for outcome in decided.outcomes) > 0


def test_the_drafter_rests_in_plain_decoding(own: OwnDriven) -> None:
    requests = mixed(own.llm.get_tokenizer(), 4)
    _, decided = own.generate(*requests, num_speculative_tokens_per_batch_size=[[1, 64, 0]])
    assert set(decided.lengths) == {0}
    assert {outcome.work.rows_per_pass for outcome in decided.outcomes} == {()}


def test_requests_that_wish_for_less_get_less(own: OwnDriven, plain: Outputs) -> None:
    prompts, params = mixed(own.llm.get_tokenizer(), FEW)
    outputs, decided = own.generate(prompts, params, policy="constant")
    assert outputs == plain[:FEW]
    stats = own.scheduler._adapter._tracker.stats.snapshot()
    drafted = sum(sum(outcome.drafted) for outcome in decided.outcomes)
    assert 0 < stats.draft_tokens < drafted


def test_sampled_requests_beside_greedy_ones(own: OwnDriven) -> None:
    prompts, _ = mixed(own.llm.get_tokenizer(), 6)
    params = [SamplingParams(temperature=t, max_tokens=24, ignore_eos=True) for t in (0.0, 1.0) * 3]
    outputs, decided = own.generate(prompts, params, policy="constant")
    assert [len(tokens) for tokens in outputs] == [24] * 6
    assert any(sum(outcome.accepted) for outcome in decided.outcomes)


def test_a_fault_costs_the_drafts_alone(own: OwnDriven, plain: Outputs, caplog: pytest.LogCaptureFixture) -> None:
    own.under(policy="constant")
    drafting = own.drafter._drafting
    drafting._controller = None
    outputs = own.llm.generate(*mixed(own.llm.get_tokenizer(), FEW), use_tqdm=False)
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == plain[:FEW]
    assert own.drafter._drafting is None
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR and r.name.startswith("dynaspec")]
    assert errors == ["dynaspec's drafter has failed; from now on vLLM decodes plainly"]
