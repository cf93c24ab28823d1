"""What an engine says of itself between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynaspec import SamplingParams
from dynaspec.engine.engine import Engine
from dynaspec.observe.estimates import MODES
from support.checkpoints import Pair
from support.engines import open_llm
from support.faulty import RaisingProposer
from unit.engine.engines import make


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12} | options)


def tokens(count: int) -> list[int]:
    """A prompt of this length."""
    return [(7 * i + count) % 90 for i in range(count)]


def drain(engine: Engine) -> None:
    while engine.unfinished:
        engine.step()


@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_in_order_of_arrival(overlapped: bool) -> None:
    engine, _ = make(overlapped=overlapped, max_seqs=2)
    for name, prompt in (("a", tokens(5)), ("b", tokens(10)), ("c", tokens(5))):
        engine.add(name, prompt, params(max_tokens=40))
    assert [(live.id, live.state) for live in engine.snapshot().requests] == [(name, "waiting") for name in "abc"]
    for _ in range(3):
        engine.step()
    found = engine.snapshot()
    assert (found.running, found.waiting) == (2, 1)
    assert [(live.id, live.state) for live in found.requests] == [("a", "running"), ("b", "running"), ("c", "waiting")]
    assert [live.prompt_tokens for live in found.requests] == [5, 10, 5]
    assert sum(live.output_tokens for live in found.requests) == found.totals.generation_tokens > 0
    assert sum(live.drafted for live in found.requests) == found.counts.draft_tokens > 0
    assert sum(live.accepted for live in found.requests) == found.counts.accepted
    engine.close()
    assert engine.snapshot().requests == ()


def test_continuations_that_have_ended_are_not_live() -> None:
    engine, _ = make(max_seqs=1)
    engine.add("r", tokens(6), params(n=2, temperature=1.0, seed=1, ignore_eos=True))
    while engine.snapshot().totals.finished["length"] < 1:
        engine.step()
    [live] = engine.snapshot().requests
    assert live.id == "r-1"
    drain(engine)


@pytest.mark.parametrize("overlapped", [False, True])
def test_every_request_is_timed(overlapped: bool) -> None:
    """Those of which only the final output is wanted too."""
    engine, rig = make(overlapped=overlapped, lengths=(0, 3))
    for i in range(6):
        engine.add(str(i), tokens(11), params(max_tokens=8 + i, ignore_eos=True), arrived_s=float(rig.ticks))
    drain(engine)
    found = engine.snapshot()
    totals, counts = found.totals, found.counts
    assert totals.finished["length"] == 6
    assert totals.prompt_tokens == 6 * 11
    assert totals.generation_tokens == sum(8 + i for i in range(6)) == totals.output_length.total
    for name in ("queue_s", "first_token_s", "prefill_s", "decode_s", "inference_s", "e2e_s", "per_output_token_s"):
        assert (name, getattr(totals, name).count) == (name, 6)
    assert totals.inter_token_s.count == counts.request_steps
    assert totals.queue_s.total + totals.prefill_s.total == pytest.approx(totals.first_token_s.total)
    assert totals.queue_s.total + totals.inference_s.total == pytest.approx(totals.e2e_s.total)
    assert totals.inter_token_s.total == pytest.approx(totals.decode_s.total)
    assert totals.first_token_s.total > totals.prefill_s.total > 0.0
    assert found.steps.step_s.count == counts.steps
    assert found.steps.recent_goodput is not None


def test_requests_that_wait_longer_have_queued_longer() -> None:
    engine, rig = make(max_seqs=1)
    for name in "ab":
        engine.add(name, tokens(11), params(), arrived_s=float(rig.ticks))
    engine.step()
    before = engine.snapshot().totals.queue_s
    drain(engine)
    after = engine.snapshot().totals.queue_s
    assert before.count == 1
    assert after.total - before.total > before.total > 0.0


@pytest.mark.parametrize("overlapped", [False, True])
def test_aborted_requests_are_counted_once(overlapped: bool) -> None:
    engine, _ = make(overlapped=overlapped, max_seqs=1)
    for name in "abc":
        engine.add(name, tokens(11), params(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    for name in "abb":
        engine.abort(name)
    drain(engine)
    totals = engine.snapshot().totals
    assert (totals.finished["abort"], totals.finished["length"]) == (2, 1)
    assert totals.e2e_s.count == 1


def test_a_preempted_request_is_scheduled_first_only_once() -> None:
    engine, _ = make(num_blocks=8, max_seqs=4)
    for i in range(4):
        engine.add(str(i), tokens(23), params(max_tokens=60, ignore_eos=True))
    drain(engine)
    found = engine.snapshot()
    assert found.counts.preemptions > 0
    assert found.totals.queue_s.count == found.totals.first_token_s.count == 4
    assert found.prefix_cache_queries == 4 * 23


@pytest.mark.parametrize("caching", [True, False])
def test_prefix_cache_counts_tokens(caching: bool) -> None:
    engine, rig = make(caching=caching)
    for i in range(3):
        engine.add(str(i), tokens(49), params())
        drain(engine)
    found = engine.snapshot()
    assert rig.tables.block_size == 16
    assert (found.prefix_cache_queries, found.prefix_cache_hits) == ((3 * 49, 2 * 48) if caching else (0, 0))


def test_salts_share_no_prefix() -> None:
    engine, _ = make(caching=True)
    for i, salt in enumerate(("a", "b", "a", None)):
        engine.add(str(i), {"prompt_token_ids": tokens(49), "cache_salt": salt}, params())
        drain(engine)
    assert engine.snapshot().prefix_cache_hits == 48


def test_prompts_whose_rows_are_all_wanted_do_not_ask_the_cache() -> None:
    engine, _ = make()
    for i in range(2):
        engine.add(str(i), tokens(40), params(prompt_logprobs=1))
        drain(engine)
    assert engine.snapshot().prefix_cache_queries == 0


def test_blocks_in_use() -> None:
    engine, rig = make()
    assert engine.snapshot().kv_blocks_used == 0
    engine.add("a", tokens(11), params(max_tokens=40))
    engine.step()
    found = engine.snapshot()
    assert found.kv_blocks == rig.num_blocks
    assert found.kv_blocks_used == rig.num_blocks - rig.tables.pool.free_count > 0
    engine.close()


def test_what_auto_believes(tiny: Pair, tmp_path: Path) -> None:
    """A decision log in between hides nothing."""
    with open_llm(
        tiny.target,
        speculative_config={"model": tiny.drafter},
        decision_log=str(tmp_path / "log.jsonl"),
        max_num_seqs=2,
    ) as llm:
        llm.generate([tokens(11)], params(max_tokens=30))
        found = llm._engine.snapshot()
    assert found.policy == "auto"
    assert found.longest_draft > 0
    assert found.estimates["expected_tokens"] > 0.0 < found.estimates["expected_step_s"]
    assert found.estimates["mode"] in MODES
    assert found.proposers == {"draft_model": True, "ngram": True}


def test_a_proposer_that_is_switched_off(tiny: Pair) -> None:
    with open_llm(
        tiny.target,
        proposer=RaisingProposer([], "advance", first=1),
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 2},
        max_num_seqs=2,
    ) as llm:
        before = llm._engine.snapshot()
        llm.generate([tokens(11)], params())
        after = llm._engine.snapshot()
    assert (before.proposers, after.proposers) == ({"scripted": True}, {"scripted": False})
    assert after.counts.proposer_faults == 1


def test_plain_decoding_believes_nothing(tiny: Pair) -> None:
    with open_llm(tiny.target) as llm:
        found = llm._engine.snapshot()
    assert (found.policy, found.longest_draft, found.proposers, found.estimates) == ("none", 0, {}, {})


def test_the_time_until_the_engine_takes_a_request_counts() -> None:
    engine, rig = make()
    now = float(rig.ticks)
    engine.add("a", tokens(11), params(), arrived_s=now - 100.0)
    drain(engine)
    totals = engine.snapshot().totals
    assert totals.queue_s.total == pytest.approx(totals.first_token_s.total - totals.prefill_s.total)
    assert totals.queue_s.total > 100.0
