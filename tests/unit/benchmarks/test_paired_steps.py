"""Steps that take turns, on tiny models."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dynaspec.bench.decoders import SharedModels, open_engine
from dynaspec.contract.errors import ConfigError
from dynaspec.control.policies.short_names import parse_policy
from paired_steps import Side, Turn, as_table, measure

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]


@pytest.fixture
def engines(tiny):
    load = SharedModels()
    opened = [open_engine(tiny.target, parse_policy(name, tiny.drafter), load=load) for name in ("plain", "constant:2")]
    yield opened
    for engine in opened:
        engine.close()


def test_every_turn_pairs_steps_that_decode_alone(engines):
    turns = measure(*engines, PROMPTS, requests=3, turns=2, tokens=40)
    assert len(turns) == 2
    for turn in turns:
        assert turn.plain.steps == turn.policy.steps
        assert turn.plain.tokens == 3 * turn.plain.steps
        assert turn.policy.tokens > turn.plain.tokens
        assert turn.drafted > turn.policy.steps
        assert min(turn.plain.seconds, turn.policy.seconds) > 0
    assert not any(engine.unfinished for engine in engines)


def test_a_turn_without_a_pair_of_steps_is_refused(engines):
    with pytest.raises(ConfigError, match="tokens is 1, which leaves no steps"):
        measure(*engines, PROMPTS, requests=1, turns=1, tokens=1)
    assert not any(engine.unfinished for engine in engines)


def test_the_ratio_is_that_of_speeds():
    turn = Turn(Side(100, 2.0, 50), Side(150, 2.0, 50), 80)
    assert turn.ratio == pytest.approx(1.5)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(as_table({2: [turn]}, "auto"))
    cells = [cell.strip() for cell in console.export_text().splitlines()[-2].strip("│").split("│")]
    assert cells == ["2", "50.0", "75.0", "1.500 (1.500 to 1.500)", "1", "1.50", "0.80"]
