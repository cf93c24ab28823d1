from __future__ import annotations

from dynaspec.propose.guard import FaultCounter, TargetPassTimer, TimeoutDetector


def test_the_pace_is_a_median_of_the_latest_passes() -> None:
    pace = TargetPassTimer()
    for _ in range(7):
        pace.record(9.0)
    assert pace.seconds is None
    pace.record(1.0)
    assert pace.seconds == 9.0
    for _ in range(15):
        pace.record(2.0)
    assert pace.seconds == 2.0
    for _ in range(31):
        pace.record(3.0)
    assert pace.seconds == 3.0


def test_strikes_in_a_row() -> None:
    strikes = FaultCounter(3, forgotten_after=2)
    assert [strikes.fault() for _ in range(4)] == [False, False, True, True]


def test_good_drafts_make_strikes_forgotten_only_in_a_row() -> None:
    strikes = FaultCounter(2, forgotten_after=2)
    assert not strikes.fault()
    strikes.good()
    assert strikes.fault()
    strikes = FaultCounter(2, forgotten_after=2)
    strikes.fault()
    strikes.good()
    strikes.good()
    assert not strikes.fault()


def test_late_as_a_rule_is_most_of_the_latest_drafts() -> None:
    lateness = TimeoutDetector()
    assert [lateness.add(True) for _ in range(9)] == [False] * 7 + [True] * 2
    assert not any(lateness.add(False) for _ in range(15))
    assert not any(lateness.add(late) for late in [True, False, False] * 30)
    assert any(lateness.add(late) for late in [True, True, False] * 5)
