from __future__ import annotations

import json
from collections import Counter
from io import StringIO
from pathlib import Path

from rich.console import Console

from soak import Load, Sample, Soak, as_table, plot
from soak_callers import Tally


def soak(*, growth: float = 0.2, wrong: int = 0, busy: int = 0, exit_code: int = 0, minutes: int = 5) -> Soak:
    samples = [Sample(s, 600 + growth * s / 60, Load(8, s % 7, 0.5)) for s in map(float, range(60 * minutes))]
    tally = Tally(Counter(answered=90, left=5, cancelled=5), 4000, wrong, ["what was wrong"] * wrong)
    return Soak(60.0 * minutes, tally, samples, Load(busy, 0, 0.0), exit_code)


def verdicts(one: Soak) -> list[bool]:
    return [good for _, _, good in one.verdicts()]


def text(one: Soak) -> str:
    written = StringIO()
    Console(width=120, file=written).print(as_table(one))
    return written.getvalue()


def test_a_good_soak() -> None:
    assert verdicts(soak()) == [True] * 4
    assert soak().as_json()["passed"]
    shown = text(soak())
    assert "100 of 100" in shown
    assert "+0.20 MB a minute" in shown
    assert "BAD" not in shown


def test_whatever_is_bad_is_said() -> None:
    for at, bad in enumerate((soak(wrong=3), soak(busy=1), soak(exit_code=1), soak(growth=1.5))):
        assert [i for i, good in enumerate(verdicts(bad)) if not good] == [at]
        assert not bad.as_json()["passed"]
        assert text(bad).count("BAD") == 1


def test_a_short_soak_says_nothing_of_memory() -> None:
    short = soak(growth=50.0, minutes=2)
    assert verdicts(short) == [True] * 3
    assert short.growth_mb_per_min is None


def test_what_is_written(tmp_path: Path) -> None:
    document = json.loads(json.dumps(soak(minutes=3).as_json()))
    assert document["ends"] == {"answered": 90, "left": 5, "cancelled": 5}
    assert document["samples"][1] == {
        "at_s": 1.0,
        "memory_mb": 600 + 0.2 / 60,
        "load": {"running": 8, "waiting": 1, "kv_usage": 0.5},
    }
    for minutes in (1, 5):
        plot(soak(minutes=minutes), tmp_path / f"{minutes}.png", "a title")
        assert (tmp_path / f"{minutes}.png").read_bytes().startswith(b"\x89PNG")
