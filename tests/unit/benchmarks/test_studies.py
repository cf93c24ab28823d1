"""The sweep, the shifting workload, the adversary and the tables, on tiny models with tiny options."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

import adversary
import load_sweep
import shifting_workload
from adversary import AdversaryCost, Drift
from dynaspec.bench.datasets import BenchPrompt, Dataset
from dynaspec.contract.errors import ConfigError
from dynaspec.result_output import as_markdown
from load_sweep import LoadResult, SweepOptions, run_sweep
from seed_tables import TableOptions, dsl_table, dynamic_table, elastic_table
from shifting_workload import ShiftOptions, run_shift
from study import mixed

PROMPTS = [BenchPrompt("the quick brown fox jumps over the lazy dog", "maths"), BenchPrompt("def add(a, b):", "code")]


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total, stage


def printed(renderable) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_sweep(tiny, tmp_path):
    options = SweepOptions(loads=(1, 3), fixed=(1, 2), rounds=2, window_s=0.02, request_tokens=16, longest_prompt=32)
    results = run_sweep(tiny.target, tiny.drafter, PROMPTS, options, quiet)
    assert [result.load for result in results] == [1, 3]
    for result in results:
        assert list(result.rates) == ["plain", "constant:1", "constant:2", "auto"]
        assert all(len(rates) == 2 and min(rates) > 0 for rates in result.rates.values())
        assert len(result.against_best.rounds) == 1
        assert len(result.against_plain.rounds) == 2
    assert "auto / best (bound)" in printed(load_sweep.as_table(results))
    json.dumps(load_sweep.as_document(results, {}))
    load_sweep.plot_sweep(results, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def load_result(auto: tuple[float, ...]) -> LoadResult:
    rates = {"plain": (10.0,) * 4, "constant:1": (12.0, 20.0, 12.0, 20.0), "constant:2": (11.0, 30.0, 11.0, 30.0)}
    return LoadResult(4, "auto", rates | {"auto": auto}, (1.0,) * 4)


def test_the_best_rival_is_picked_on_odd_rounds_and_met_on_even_ones():
    result = load_result((5.0, 20.0, 5.0, 20.0))
    assert result.best == "constant:1"
    assert result.against_best.rounds == (1.0, 1.0)
    assert result.against_best.holds
    assert result.against_plain.rounds == (0.5, 2.0, 0.5, 2.0)
    assert not result.against_plain.holds


def test_both_median_and_bound_must_hold():
    assert load_result((9.95,) * 4).against_plain.holds
    assert not load_result((9.8,) * 4).against_plain.holds  # median
    assert not load_result((10.0, 9.0, 10.0, 10.0)).against_plain.holds  # bound
    text = load_sweep.verdict([load_result((9.8,) * 4)]).plain
    assert text.startswith("MISSED best at 4, plain at 4")


@pytest.mark.parametrize("wrong", [{"rounds": 1}, {"loads": ()}, {"loads": (0,)}, {"fixed": (0, 1)}])
def test_sweep_options(wrong):
    with pytest.raises(ConfigError, match="expected at least 2 rounds"):
        SweepOptions(**wrong)


def test_kinds_alternate():
    prompts = [BenchPrompt(str(i), "a") for i in range(3)] + [BenchPrompt("x", "b")]
    assert [prompt.text for prompt in mixed(prompts)] == ["0", "x", "1", "2"]


def test_shift(tiny, tmp_path):
    options = ShiftOptions(fixed=(1, 2), rounds=2, scale=0.04)
    result = run_shift(tiny.target, tiny.drafter, PROMPTS, options, quiet)
    assert result.phases == ("easy", "hard", "burst", "tail")
    assert result.different == 0
    assert set(result.runs) == {"plain", "constant:1", "constant:2", "auto"}
    tokens = {tuple(trace.tokens for trace in run.values()) for runs in result.runs.values() for run in runs}
    assert len(tokens) == 1  # every side has the same work
    assert "burst" in printed(shifting_workload.as_table(result))
    said = shifting_workload.verdict(result).plain
    assert result.best_fixed in said
    assert said.count("one round, no bound") == said.count("(bound ") == 1  # one even round; two of plain decoding
    json.dumps(shifting_workload.as_document(result, {}))
    shifting_workload.plot_shift(result, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_drift():
    drifting = [4.0] * 100 + [2.0] * 30 + [0.4] * 170 + [0.0] * 20 + [4.0] * 280
    drift = Drift(tuple(drifting))
    assert drift.watched == pytest.approx(0.4)
    assert drift.recovered_after == 20 + 15
    assert Drift(tuple(drifting[:320] + [1.0] * 280)).recovered_after is None


def test_the_cost_of_an_adversary(tmp_path):
    cost = AdversaryCost((1.0, 1.0, 1.0), (1.02, 1.01, 1.05), (0.1, 0.1, 0.1))
    assert cost.cost == pytest.approx(1 - 1 / 1.02)
    assert cost.worst == pytest.approx(1 - 1 / 1.05)
    drift = Drift((4.0,) * 600)
    first, second, third = adversary.lines(cost, drift, "auto")
    assert first.endswith("reached")
    assert second.endswith("MISSED")
    assert third.endswith("reached")
    json.dumps(adversary.as_document(cost, drift))
    adversary.plot_drift(drift, tmp_path / "p.png", "auto")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_tables(tiny):
    data = (Dataset("one", tuple(PROMPTS)), Dataset("other", tuple(PROMPTS[:1])))
    options = TableOptions(
        tiny.target,
        tiny.drafter,
        data,
        loads=(2,),
        rounds=1,
        window_tokens=8,
        thresholds=(0.4,),
        longest=(4,),
        gates=(0.5,),
    )
    (dynamic,) = dynamic_table(options, quiet)
    assert list(dynamic) == [
        *("requests", "plain (ms)", "constant:5 (ms)", "goodput, one (ms)", "goodput, one, online (ms)"),
        *("goodput, other (ms)", "goodput, other, online (ms)"),
    ]
    (dsl,) = dsl_table(options, quiet)
    assert dsl["over plain"] > 0
    elastic = elastic_table(options, quiet)
    assert [row["lengths"] for row in elastic] == ["5/10/15", "5", "10", "15"]
    assert all(row["KV writes skipped"] > 0 for row in elastic)
    assert as_markdown([{"a": 1, "b": None}]) == "| a | b |\n| ---: | ---: |\n| 1 | - |\n"
