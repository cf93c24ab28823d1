from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from dynaspec.bench.plots import plot_profile
from dynaspec.bench.profiling import Cells, Grid, acceptance_rates, as_profile, as_table, best_length, goodput
from dynaspec.contract.errors import ConfigError
from dynaspec.control.profile import Profile

PROFILE = Profile({1: {0: 4.0, 1: 5.0, 2: 6.0}, 8: {0: 4.0, 1: 9.0, 2: 15.0}}, (0.9, 0.7), 2)


def test_grid():
    grid = Grid((8, 1, 8), (3, 1), 2)
    assert grid.batch_sizes == (1, 8)
    assert grid.lengths == (0, 1, 3)
    assert grid.longest == 3
    for sizes, lengths in (((), (1,)), ((0,), (1,)), ((1,), ()), ((1,), (0,)), ((1,), (-1,))):
        with pytest.raises(ConfigError, match="expected"):
            Grid(sizes, lengths, 1)


def test_rates_are_of_the_drafts_that_reach_a_position():
    # 2 of 10 drafts were cut to one token by the end of their request.
    assert acceptance_rates((10, 8, 8), (5, 4), 3) == (0.5, 0.5, 0.0)
    assert acceptance_rates((10, 2), (5, 2), 2) == (0.5, 0.5)  # never rising
    assert acceptance_rates((4,), (1,), 3) == (0.25, 0.0, 0.0)


def test_cells_outlive_an_interruption(tmp_path):
    path = tmp_path / "cells.jsonl"
    cells = Cells(path, {"model": "m", "sizes": (1, 2)})
    assert not cells.stale
    cells.add_step_ms(0, 1, 0, [1.0, 3.0])
    cells.add_step_ms(1, 1, 0, [2.0])
    cells.add_acceptance(2, (4, 4), (2, 1))
    with path.open("a") as file:
        file.write('{"turn": 0, "batch": 2, "k"')  # torn
    again = Cells(path, {"model": "m", "sizes": (1, 2)})
    assert len(again) == 3
    assert (again.step_ms(0, 1, 0), again.step_ms(1, 1, 0)) == ([1.0, 3.0], [2.0])
    assert again.acceptance(2) == ((4, 4), (2, 1))
    assert again.step_ms(0, 2, 0) is None
    again.add_step_ms(0, 2, 0, [5.0])
    assert Cells(path, {"model": "m", "sizes": (1, 2)}).step_ms(0, 2, 0) == [5.0]


def test_cells_of_something_else_are_not_used(tmp_path):
    path = tmp_path / "cells.jsonl"
    Cells(path, {"model": "a"}).add_step_ms(0, 1, 0, [1.0])
    other = Cells(path, {"model": "b"})
    assert other.stale
    assert len(other) == 0
    assert json.loads(path.read_text()) == {"made_with": {"model": "b"}}


def test_cells_need_a_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be kept"):
        Cells(tmp_path / "none" / "cells.jsonl", {})


def test_the_profile_has_medians_over_all_batches(tmp_path):
    cells = Cells(tmp_path / "cells.jsonl", {})
    for k in (0, 2):
        cells.add_step_ms(0, 4, k, [1.0 + k, 9.0, 2.0 + k])
        cells.add_step_ms(1, 4, k, [2.0 + k, 2.0 + k])
    grid = Grid((4,), (2,), 2)
    profile = as_profile(grid, cells.times(grid), (10, 10), (6, 3))
    assert profile == Profile({4: {0: 2.0, 2: 4.0}}, (0.6, 0.3), 2)
    with pytest.raises(ConfigError, match="nothing was drafted"):
        as_profile(grid, cells.times(grid), (), ())


def test_the_report(tmp_path):
    assert best_length(PROFILE, 1) == 2
    assert best_length(PROFILE, 8) == 0
    assert goodput(PROFILE, 1, 1) == pytest.approx(1900 / 5.0)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(as_table(PROFILE, "title"))
    assert "15.00" in console.export_text()
    path = tmp_path / "profile.png"
    plot_profile(PROFILE, path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_profile(PROFILE, tmp_path / "none" / "p.png", "title")
