"""A controller keeps things about requests, and is told of the end of each: also of those that nobody waits for."""

from __future__ import annotations

import pytest

from unit.engine.fakes import Rig, prompt, request


@pytest.mark.parametrize("overlapped", [False, True])
def test_every_request_is_forgotten_however_it_ends(overlapped: bool) -> None:
    rig = Rig((3,), "draft_model", overlapped, max_seqs=3)
    requests = [request(f"r{i}", prompt(9, i), most=12) for i in range(8)]
    for one in requests:
        rig.scheduler.add(one)
    for _ in range(3):
        rig.advance()
    running, waiting = requests[1], requests[6]
    assert running.lane is not None
    assert waiting.lane is None
    for one in (running, waiting):
        rig.scheduler.abort(one)
    rig.advance()
    assert {running.id, waiting.id} <= set(rig.controller.forgotten)
    rig.finish()
    assert sorted(rig.controller.forgotten) == [one.id for one in requests]


def test_one_that_lost_its_place_and_is_then_aborted_is_forgotten() -> None:
    rig = Rig((3,), "draft_model", num_blocks=5, max_seqs=3)
    requests = [request(f"r{i}", prompt(17, i), most=30) for i in range(3)]
    for one in requests:
        rig.scheduler.add(one)
    while not rig.scheduler.preemptions:
        rig.advance()
    [victim] = [one for one in requests if one.preemptions]
    rig.scheduler.abort(victim)
    rig.finish()
    assert sorted(rig.controller.forgotten) == [one.id for one in requests]
