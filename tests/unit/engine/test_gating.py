"""The drafter's KV writes are gated: no token changes, whatever else is going on."""

from __future__ import annotations

from typing import Any

import pytest

from unit.engine.fakes import Result, Rig, prompt, request

CYCLE = (5, 3, 0, 6)
SIZES = (3, 40, 17, 1, 26, 16)
SEEDED = {"temperature": 0.7, "seed": 11, "top_k": 12}


def run(rig: Rig, params: dict[str, Any]) -> dict[str, Result]:
    return rig.run([request(f"r{i}", prompt(size, i), most=18 + i, **params) for i, size in enumerate(SIZES)])


@pytest.mark.parametrize("overlapped", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("params", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("gate", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("shape", [{}, {"num_blocks": 5}, {"caching": False, "max_seqs": 1}])
def test_gating_changes_no_token(overlapped: bool, params: dict[str, Any], gate: float, shape: dict[str, Any]) -> None:
    rig = Rig(CYCLE, "draft_model", overlapped, gate=gate, **shape)
    assert run(rig, params) == run(Rig(max_seqs=8, num_blocks=128), params)
    assert all(guard.enabled for guard in rig.guards)
    counts = rig.stats.snapshot()
    assert counts.kv_skipped > 0
    assert 0 < counts.accepted < counts.verified
    assert counts.kv_redone <= counts.accepted
    if gate == 1.0:
        assert counts.kv_redone > 0
    assert (rig.scheduler.preemptions > 0) == ("num_blocks" in shape)


def test_without_gating_nothing_is_done_twice() -> None:
    rig = Rig(CYCLE, "draft_model", num_blocks=5)
    run(rig, {})
    counts = rig.stats.snapshot()
    assert (counts.kv_skipped, counts.kv_redone) == (0, 0)
