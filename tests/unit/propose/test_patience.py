from __future__ import annotations

from dynaspec.propose.patience import Strikes, TargetPace


def test_the_pace_is_a_median_of_the_latest_passes() -> None:
    pace = TargetPace()
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
    strikes = Strikes(3, forgotten_after=2)
    assert [strikes.fault() for _ in range(4)] == [False, False, True, True]


def test_good_drafts_make_strikes_forgotten_only_in_a_row() -> None:
    strikes = Strikes(2, forgotten_after=2)
    assert not strikes.fault()
    strikes.good()
    assert strikes.fault()
    strikes = Strikes(2, forgotten_after=2)
    strikes.fault()
    strikes.good()
    strikes.good()
    assert not strikes.fault()
