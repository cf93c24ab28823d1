"""The page's modules by themselves: what is remembered, and how numbers are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from browser.serving import Served

OpenPage = Callable[..., Any]

HISTORY = """async (calls) => {
  const { History } = await import("/dashboard/static/js/history.js");
  const history = new History();
  for (const points of calls) history.add(points);
  return { columns: history.columns, averaged: history.averaged(3), latest: history.latest("x") };
}"""
FORMATS = """async (cases) => {
  const format = await import("/dashboard/static/js/format.js");
  return cases.map(([name, value]) => format[name](value));
}"""


@pytest.fixture
def page(open_page: OpenPage, served: Served) -> Any:
    return open_page(served.url)


def remembered(page: Any, *calls: dict[str, list[float | None]]) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(HISTORY, list(calls))
    return found


def test_points_are_remembered_once(page: Any) -> None:
    found = remembered(page, {"t": [1, 2], "x": [5, 6]}, {"t": [1, 2, 3], "x": [5, 6, 7]}, {"t": [], "x": []})
    assert found["columns"] == {"t": [1, 2, 3], "x": [5, 6, 7]}
    assert found["latest"] == 7


def test_where_nobody_looked_is_a_hole(page: Any) -> None:
    found = remembered(page, {"t": [1, 2, 22], "x": [5, 6, 7]}, {"t": [32], "x": [8]})
    assert found["columns"] == {"t": [1, 2, 12, 22, 27, 32], "x": [5, 6, None, 7, None, 8]}
    assert None in found["averaged"]["x"]


def test_only_ten_minutes_are_remembered(page: Any) -> None:
    times = [float(t) for t in range(0, 1000, 4)]
    found = remembered(page, {"t": times, "x": times})
    assert (found["columns"]["t"][0], found["columns"]["x"][-1]) == (396, 996)


def test_means_leave_out_what_is_not_known(page: Any) -> None:
    found = remembered(page, {"t": [3, 4, 5, 6, 7], "x": [1, None, 3, None, None]})
    assert found["averaged"] == {"t": [4, 6.5], "x": [2, None]}


def test_numbers_are_written_for_people(page: Any) -> None:
    cases: list[tuple[str, Any, Any]] = [
        ("number", 1234.5, "1,235"),
        ("number", 42.04, "42.0"),
        ("number", 0.512, "0.51"),
        ("number", 0, "0"),
        ("number", None, "–"),
        ("short", 1200, "1.2k"),
        ("short", 0, "0"),
        ("short", 3_400_000, "3.4M"),
        ("percent", 0.004, "0.4 %"),
        ("percent", 0.0001, "<0.1 %"),
        ("percent", 0.5, "50 %"),
        ("percent", 0, "0 %"),
        ("duration", 1500, ["1.50", "s"]),
        ("duration", 12.5, ["12.5", "ms"]),
        ("duration", None, ["–", ""]),
        ("span", 0, "0 s"),
        ("span", 59, "59 s"),
        ("span", 3600, "1 h 0 min"),
        ("span", 100_000, "1 d 3 h"),
    ]
    found = page.evaluate(FORMATS, [[name, value] for name, value, _ in cases])
    assert found == [expected for _, _, expected in cases]
