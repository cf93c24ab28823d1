"""What requests report about their drafts adds up to what the engine counts."""

from __future__ import annotations

import pytest

from dynaspec import SamplingParams
from dynaspec.contract.outputs import RequestMetrics
from support.checkpoints import Pair
from support.engines import open_llm
from support.workloads import PROMPTS


@pytest.mark.parametrize("scheduling", ["serial", "async"])
def test_requests_add_up_to_the_engine(scheduling: str, tiny: Pair) -> None:
    with open_llm(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "heuristic", "num_speculative_tokens": 4},
        max_num_seqs=4,
        async_scheduling=scheduling == "async",
    ) as llm:
        params = [
            SamplingParams(temperature=0.7, seed=i, max_tokens=30, speculation_metrics="detailed")
            for i in range(len(PROMPTS))
        ]
        outputs = llm.generate(PROMPTS, params)
        stats = llm.stats()
    metrics = [output.outputs[0].metrics for output in outputs]
    for name in ("drafts", "verified", "accepted", "draft_emitted"):
        assert sum(getattr(m, name) for m in metrics) == getattr(stats, name)
    assert sum(m.drafted for m in metrics) == stats.draft_tokens
    assert sum(m.steps for m in metrics) == stats.request_steps
    for name in ("drafted_per_pos", "accepted_per_pos"):
        whole = getattr(stats, name)
        columns = [getattr(m, name) for m in metrics]
        added = tuple(sum(c[j] for c in columns if j < len(c)) for j in range(max(map(len, columns))))
        assert added[: len(whole)] == whole
        assert not any(added[len(whole) :])
    assert all(len(m.per_step) == m.steps for m in metrics)
    assert stats.accepted > 0


def test_a_request_may_want_no_counts_and_no_drafts(tiny: Pair) -> None:
    with open_llm(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 4},
        max_num_seqs=2,
    ) as llm:
        wishes = [
            SamplingParams(temperature=0.0, max_tokens=20, speculation_metrics="off"),
            SamplingParams(temperature=0.0, max_tokens=20, max_draft_tokens=0),
        ]
        silent, plain = (output.outputs[0].metrics for output in llm.generate(PROMPTS[:2], wishes))
        drafts = llm.stats().drafts
    assert drafts > 0
    assert _of_drafts(silent) == _of_drafts(plain) == (0, 0, 0, 0, 0)
    assert plain.steps == 19 > silent.steps > 0


def _of_drafts(metrics: RequestMetrics) -> tuple[int, ...]:
    return (metrics.drafts, metrics.drafted, metrics.verified, metrics.accepted, metrics.draft_emitted)
