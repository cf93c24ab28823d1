from __future__ import annotations

from dynaspec.schedule.scheduler import Lanes
from unit.engine.fakes import request


def test_lanes_are_handed_out_lowest_first() -> None:
    lanes = Lanes(3, 32)
    requests = [request(name, [1, 2]) for name in "abc"]
    assert [lanes.open(one, 0) for one in requests] == [0, 1, 2]
    assert lanes.free_count == 0
    for lane in (2, 0):
        lanes.vacate(lane)
        assert lanes.free_count == 0  # a step in flight may still read it
    for lane in (2, 0):
        lanes.reuse(lane)
    assert (lanes.free_count, lanes.next_free) == (2, 0)


def test_a_seated_request_fills_its_row() -> None:
    lanes = Lanes(2, 8)
    lanes.last_draft[0] = lanes.branches[0] = 5
    one = request("a", [4, 5, 6], most=3)
    one.output = [7]
    lane = lanes.open(one, 2)
    assert lanes.tokens[lane, :4].tolist() == [4, 5, 6, 7]
    assert (lanes.length[lane], lanes.expected[lane], lanes.max_length[lane]) == (4, 4, 6)
    assert (lanes.computed[lane], lanes.expected_computed[lane]) == (2, 2)
    assert (lanes.last_draft[lane], lanes.branches[lane]) == (0, 0)
    assert (one.lane, lanes.requests[lane]) == (lane, one)
    lanes.vacate(lane)
    assert (one.lane, lanes.requests[lane]) == (None, None)
