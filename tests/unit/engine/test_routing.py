"""A draft model and lookup side by side in one engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.proposer import DecodeBatch, Drafts
from dynaspec.contract.step import Needs, SpecPlan
from dynaspec.propose.ngram import NgramProposer, longest_match
from unit.engine.fakes import Result, Rig, prompt, request

CYCLE = (5, 3, 0, 5)
SIZES = (3, 40, 17, 1, 26, 16)
BOTH = ("draft_model", "ngram")
SEEDED = {"temperature": 0.3, "seed": 11, "top_k": 12}


def run(rig: Rig, params: dict[str, Any] | None = None) -> dict[str, Result]:
    prompts = [prompt(size, i) for i, size in enumerate(SIZES)]
    return rig.run([request(f"r{i}", text, most=18 + i, **params or {}) for i, text in enumerate(prompts)])


def plain(**params: Any) -> dict[str, Result]:
    return run(Rig(max_seqs=8, num_blocks=128, order=1), params)


@pytest.mark.parametrize("overlapped", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("params", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shape", [{}, {"num_blocks": 5}, {"gate": 0.5}])
def test_taking_turns_changes_no_token(overlapped: bool, params: dict[str, Any], shape: dict[str, Any]) -> None:
    rig = Rig(CYCLE, BOTH, overlapped, order=1, **shape)
    assert run(rig, params) == plain(**params)
    assert all(guard.enabled for guard in rig.guards)
    accepted = [0, 0]
    for outcome in rig.controller.outcomes:
        for proposer, tokens, confidence in zip(outcome.proposer, outcome.accepted, outcome.confidence, strict=True):
            accepted[proposer] += tokens
            assert not confidence or proposer == 0
    assert min(accepted) > 0


def test_unseeded_sampling_runs_through() -> None:
    rig = Rig(CYCLE, BOTH, num_blocks=7, order=1)
    assert [len(result.output) for result in run(rig, {"temperature": 0.8}).values()] == [18, 19, 20, 21, 22, 23]
    assert all(guard.enabled for guard in rig.guards)


def test_the_controller_sees_a_column_of_each() -> None:
    rig = Rig(CYCLE, BOTH, order=1)
    run(rig)
    for view in rig.controller.views:
        assert [len(column) for column in view.lag] == [len(view.ids)] * 2
        assert view.lag[1] == (0,) * len(view.ids)
        assert view.offers[0] is None
        assert len(view.offers[1] or ()) == len(view.ids)
    assert any(max(view.lag[0], default=0) > 1 for view in rig.controller.views)


@pytest.mark.parametrize("overlapped", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize(("needs", "columns"), [("all", (2, 1)), ("lag", (2, 0)), ("nothing", (0, 0))])
def test_proposers_are_asked_what_the_plan_before_needs(
    overlapped: bool, needs: Needs, columns: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(CYCLE, BOTH, overlapped, order=1)
    plan = rig.controller.plan
    monkeypatch.setattr(rig.controller, "plan", lambda view: replace(plan(view), next_needs=needs))
    assert run(rig) == plain()
    assert rig.controller.views[0].lag
    seen = {(len(view.lag), sum(column is not None for column in view.offers)) for view in rig.controller.views[1:]}
    assert seen == {columns}


def test_outcomes_tell_what_came_of_offers_that_nobody_took_up(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(CYCLE, BOTH, order=1)
    plan = rig.controller.plan
    monkeypatch.setattr(rig.controller, "plan", lambda view: replace(plan(view), proposer=(0,) * len(view.ids)))
    results = run(rig)
    texts = {f"r{i}": np.array([*prompt(size, i), *results[f"r{i}"].output]) for i, size in enumerate(SIZES)}
    views, right = {view.step: view for view in rig.controller.views}, [0, 0]
    for outcome in rig.controller.outcomes:
        view, (model, lookup) = views[outcome.plan_step], outcome.came_true
        assert model is None
        for i, (name, (match, compared, agreed)) in enumerate(zip(outcome.ids, lookup or (), strict=True)):
            length, (matched, offered) = view.context_len[i], (view.offers[1] or ())[i]
            assert (match, compared) == (matched, min(offered, outcome.emitted[i]))
            start = longest_match(texts[name][:length].astype(np.int32), length, 1, 3, 64)[1]
            same = texts[name][length : length + compared] == texts[name][start : start + compared]
            assert agreed == (compared if same.all() else same.argmin())
            right[0], right[1] = right[0] + compared, right[1] + agreed
    assert 0 < right[1] < right[0]


def test_steps_that_are_planned_ahead_tell_nothing_of_offers() -> None:
    """They looked for them in a text that was not there yet."""
    rig = Rig(CYCLE, BOTH, overlapped=True, order=1)
    run(rig)
    told = [outcome for outcome in rig.controller.outcomes if outcome.came_true]
    assert len(told) < 3 < len(rig.controller.outcomes)


class Broken(NgramProposer):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__(1, 3)
        setattr(self, method, self._raise)

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        return super().propose(batch, plan)

    @staticmethod
    def _raise(*_: object) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize("overlapped", [False, True], ids=["serial", "overlapped"])
@pytest.mark.parametrize("method", ["propose", "lag", "peek", "advance", "admit", "evict"])
def test_faults_of_one_leave_the_other_alone(method: str, overlapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rig = Rig((4,), ("draft_model", Broken(method)), overlapped, order=1)
    assert run(rig) == plain()
    assert rig.guards[0].enabled
    assert not rig.guards[1].enabled
    late = rig.controller.outcomes[-len(rig.controller.outcomes) // 2 :]
    drafted = [0, 0]
    for outcome in late:
        for proposer, tokens in zip(outcome.proposer, outcome.drafted, strict=True):
            drafted[proposer] += tokens
    assert drafted[0] > 0
    assert drafted[1] == 0
