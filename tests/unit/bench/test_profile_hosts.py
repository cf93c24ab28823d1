"""One reading of decision logs for every host: times by batch size and length, and acceptance."""

from __future__ import annotations

import pytest

from dynaspec.api.llm import open_embedded
from dynaspec.bench.profile_hosts import measured_in, record
from dynaspec.bench.profiling import WARM_STEPS, Grid
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.sampling_params import SamplingParams
from support.checkpoints import save_pair
from unit.explain.logs import Fixed, Host


def test_steps_in_which_all_requests_draft_alike_are_timed(tmp_path):
    log = Host(tmp_path / "log", rates=(0.9, 0.5)).run(Fixed(3), 30)
    found = measured_in([log])
    assert list(found.step_ms) == [(2, 3)]
    assert len(found.step_ms[2, 3]) == 30 - WARM_STEPS - 1
    # The context grows by a token a step, all else is alike.
    assert found.step_ms[2, 3] == sorted(found.step_ms[2, 3])
    assert found.drafted == (60, 60, 60)
    assert found.accepted[0] > found.accepted[1] > found.accepted[2] > 0


def test_steps_that_prefill_or_draft_unevenly_are_not(tmp_path):
    prefills = Host(tmp_path / "prefills", prefill=4).run(Fixed(3), 10)
    uneven = Host(tmp_path / "uneven").run(Fixed(3), 10, room_depth=(1, 50))
    untimed = Host(tmp_path / "untimed", timed=False, whole=True).run(Fixed(3), 10)
    assert not any(measured_in([prefills, uneven]).step_ms.values())
    assert measured_in([untimed]).drafted == (20, 20, 20)


def test_acceptance_is_that_of_requests_without_a_limit_of_their_own(tmp_path):
    bad = Host(tmp_path / "bad", rates=(0.0,)).run(Fixed(3), 20, max_draft=(3, 3))
    good = Host(tmp_path / "good", rates=(1.0,)).run(Fixed(3), 5)
    assert measured_in([bad, good]).accepted == (10, 10, 10)
    assert measured_in([bad]).accepted == (0, 0, 0)
    assert measured_in([bad]).drafted == (40, 40, 40)


def test_the_profile_has_medians(tmp_path):
    lengths = {0: Fixed(0), 2: Fixed(2)}
    logs = [Host(tmp_path / f"{k}", rates=(0.8,), whole=True).run(policy, 40) for k, policy in lengths.items()]
    found = measured_in(logs)
    profile = found.profile(Grid((2,), (2,), 1))
    assert list(profile.batch_stats) == [2]
    times = found.step_ms[2, 0]
    assert profile.batch_stats[2][0] == pytest.approx(sorted(times)[len(times) // 2], abs=1e-3)
    assert profile.batch_stats[2][2] > profile.batch_stats[2][0]
    assert profile.acceptance_rate_per_pos[0] == pytest.approx(0.8, abs=0.15)
    with pytest.raises(ConfigError, match="2 requests never decoded at once with drafts of 5 tokens"):
        found.profile(Grid((2,), (5,), 1))
    nothing = Host(tmp_path / "nothing").run(Fixed(0), 9)
    assert measured_in([nothing]).drafted == ()


def test_an_engine_is_driven_through_the_whole_grid(tmp_path):
    pair = save_pair(tmp_path)
    log = tmp_path / "decisions.jsonl"
    speculation = {"model": pair.drafter, "policy": "constant", "num_speculative_tokens": 3}
    options = {"max_num_seqs": 2, "decision_log": str(log), "enable_prefix_caching": False}
    engine = open_embedded(pair.target, speculation, options)
    grid = Grid((1, 2), (1, 3), 1)
    try:
        prompts = [(5, 6, 7, 8), (9, 10, 11), (40, 41)]
        record(engine, grid, prompts, SamplingParams(temperature=0, detokenize=False), lambda *told: None)
        assert not engine.unfinished
        engine.verify_integrity()
    finally:
        engine.close()
    profile = measured_in([log]).profile(grid)
    assert {size: list(row) for size, row in profile.batch_stats.items()} == {1: [0, 1, 3], 2: [0, 1, 3]}
    assert profile.max_num_speculative_tokens == 3
